"""Sound models of sequences: padding that nothing sees, recurrences, attention, dropout in all of them."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from tests.probe_corpus.case import Case, Make, entry
from tests.probe_corpus.data import CLASSES, WIDTH, WORDS, Batch, series
from tests.probe_corpus.fault_padding import collated, tag_loss, tensors, topic_loss

SOUND: list[Make] = []
sound = partial(entry, SOUND)()


class Causal(nn.Module):
    """Attention that looks back only, positions that go with time, input and output embeddings tied."""

    def __init__(self, dropout_p: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("position", torch.randn(16, WIDTH))
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.dropout_p = dropout_p

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        time = input_ids.shape[1]
        x = self.embedding(input_ids) + self.position[:time]
        query, key, value = self.mix(self.norm(x)).unflatten(2, (6, -1)).transpose(1, 2).chunk(3, dim=1)
        seen = attention_mask.bool()[:, None, None, :] & torch.ones(time, time, dtype=torch.bool).tril()
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, dropout_p=self.dropout_p if self.training else 0.0
        )
        return self.head(x + attended.transpose(1, 2).flatten(2))


@sound
def causal_language_model() -> Case:
    return collated(Causal(0.0), tag_loss)


@sound
def causal_language_model_padded_beforehand() -> Case:
    return tensors(Causal(0.0), tag_loss)


@sound
def dropout_in_attention() -> Case:
    return tensors(Causal(0.3), tag_loss)


@sound
def dropout_in_attention_of_ragged_rows() -> Case:
    """Shorter micro-batches draw fewer numbers for each row."""
    return collated(Causal(0.3), tag_loss)


class Encoder(nn.Module):
    """Torch's own encoder, told what is padding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = attention_mask == 0
        x = self.encoder(self.embedding(input_ids), src_key_padding_mask=hidden)
        shares = (~hidden).to(x.dtype)[:, :, None]
        return self.head((x * shares).sum(dim=1) / shares.sum(dim=1))


@sound
def encoder_with_dropout() -> Case:
    return tensors(Encoder(0.2), topic_loss)


@sound
def encoder_of_ragged_rows() -> Case:
    return collated(Encoder(0.0), topic_loss)


@sound
def encoder_of_ragged_rows_with_dropout() -> Case:
    return collated(Encoder(0.2), topic_loss)


class Swapped(nn.Module):
    """Attention with time first, as it wants it, and the axes swapped for it and back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.transpose(0, 1)).mean(dim=0))


@sound
def encoder_with_time_first() -> Case:
    return Case(model=Swapped(), loss=nn.CrossEntropyLoss(), batch=series())


class Recurrent(nn.Module):
    """Two layers with dropout between them, in one order of axes or the other."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 5, num_layers=2, dropout=0.3, batch_first=batch_first)
        self.head, self.batch_first = nn.Linear(5, CLASSES), batch_first

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x if self.batch_first else x.transpose(0, 1))
        return self.head(states.mean(dim=1 if self.batch_first else 0))


@sound
def lstm_with_dropout() -> Case:
    return Case(model=Recurrent(batch_first=True), loss=nn.CrossEntropyLoss(), batch=series())


@sound
def lstm_with_dropout_and_time_first() -> Case:
    return Case(model=Recurrent(batch_first=False), loss=nn.CrossEntropyLoss(), batch=series())


@sound
def outputs_with_time_first() -> Case:
    """Nothing but the loss knows that rows are the second axis of the output."""

    class Forecast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(WIDTH, 5), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x.transpose(0, 1))[0])

    def loss(model: nn.Module, micro: tuple[Tensor, Tensor]) -> ab.Total:
        x, y = micro
        return ab.Total((model(x).transpose(0, 1) - y).abs().sum(), y.numel())

    return Case(model=Forecast(), loss=loss, batch=(torch.randn(8, 5, WIDTH), torch.randn(8, 5, 1)))


class Packed(nn.Module):
    """Reads each row as far as it goes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(WIDTH, 5, 2, batch_first=True, bidirectional=True, dropout=dropout)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(input_ids), attention_mask.sum(dim=1).cpu(), batch_first=True, enforce_sorted=False
        )
        hidden = self.lstm(packed)[1][0][-2:]
        return self.head(hidden.transpose(0, 1).flatten(1))


@sound
def packed_lstm() -> Case:
    return collated(Packed(), topic_loss)


@sound
def packed_lstm_padded_beforehand() -> Case:
    return tensors(Packed(), topic_loss)


@sound
def packed_lstm_with_dropout() -> Case:
    """What is drawn between the layers has a line for each word, sorted by time, not by row."""
    return tensors(Packed(0.3), topic_loss)


class Pooled(nn.Module):
    """The mean over the places that hold a word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.layer, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.layer(self.embedding(input_ids)).tanh()
        shares = attention_mask[:, :, None].to(x.dtype)
        return self.head(self.dropout((x * shares).sum(dim=1) / shares.sum(dim=1)))


@sound
def masked_mean() -> Case:
    return collated(Pooled(), topic_loss)


class Bag(nn.Module):
    """Integers in, and no other float than the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = (
            nn.EmbeddingBag(WORDS, WIDTH, mode="sum", padding_idx=0),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.bag(input_ids * attention_mask))


@sound
def bag_of_words() -> Case:
    return collated(Bag(), topic_loss)


class LastWord(nn.Module):
    """Finds the end of each row by its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, 5, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states, _ = self.rnn(self.embedding(input_ids))
        return self.head(states[torch.arange(len(states)), attention_mask.sum(dim=1) - 1])


@sound
def last_word_by_the_mask() -> Case:
    """The states after the end are computed and thrown away."""
    return tensors(LastWord(), topic_loss)


class Untied(nn.Module):
    """Reads padding as a word of its own, for labels that stand at every place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids)).transpose(1, 2)


@sound
def zero_is_a_word_like_any_other() -> Case:
    """Nothing is padded: rows happen to end in the word 0, and there is neither mask nor padding index."""
    words = torch.randint(WORDS, (8, 6))
    words[::2, -2:] = 0
    return Case(
        model=Untied(), loss=nn.CrossEntropyLoss(), batch={"input_ids": words, "labels": words.roll(-1, 1)}
    )


def shifted_loss(model: nn.Module, micro: Batch) -> ab.Total:
    """The next word, where there is one."""
    logits, labels = model(micro["input_ids"], micro["attention_mask"])[:, :-1], micro["labels"][:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return ab.Total(losses, (labels != -100).sum())


@sound
def next_word() -> Case:
    return collated(Causal(0.0), shifted_loss)
