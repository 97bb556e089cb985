"""WholeBatchTrainer: the Trainer's run with the whole batch at once, whatever the cut and the setting."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.core import LossError, PlanError

for needed in ("accelerate", "peft", "transformers"):
    pytest.importorskip(needed)

import transformers  # noqa: E402

from benchmarks import homes_transformers as homes  # noqa: E402
from benchmarks.homes_transformers import TASKS, Task, error, quiet, train, weights  # noqa: E402
from tests.homes.tasks import as_rank, dies_at, was_killed  # noqa: E402
from tests.parallel.spawned import spawned  # noqa: E402

LIMIT = 1e-12  # float64, before clipping
UPDATED = 1e-9  # parameters after 20 updates: AdamW divides by the root of squares
LOGGED = 1e-6  # the Trainer adds losses up in float32
IN_FLOAT32 = 2e-6  # TRL computes its loss in float32
CAUSAL, MASKED, OWN = (homes.BY_NAME[name] for name in ("causal LM", "masked LM", "own weighted loss"))

IGNORED = ("ignore::UserWarning:transformers", "ignore::UserWarning:torch", "ignore::FutureWarning")
pytestmark = [pytest.mark.filterwarnings(*IGNORED), pytest.mark.usefixtures("host_leaves_nothing_behind")]


def installed(task: Task) -> float:
    """Skip a task whose library is missing; return the limit of its error."""
    pytest.importorskip(task.needs)
    return LIMIT if task.needs == "transformers" else IN_FLOAT32


def with_host(base: type = transformers.Trainer, **own: Any) -> Task:
    """Return a task with a host that has these methods and attributes."""
    return Task("test", OWN.model, OWN.labels, lambda: type("Host", (base,), own))


def divided(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / num_items_in_batch


SETTINGS: dict[str, tuple[Task, dict[str, Any]]] = {
    **{task.name: (task, {}) for task in TASKS},
    "gradient checkpointing": (MASKED, {"gradient_checkpointing": True}),
    "compute_loss_func": (MASKED, {"own": {"compute_loss_func": divided}}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_twenty_updates_are_those_of_the_whole_batch(name: str) -> None:
    task, more = SETTINGS[name]
    limit = installed(task)
    whole, home = [train(task, mode, updates=20, max_grad_norm=0.5, **more) for mode in ("whole", "home")]
    assert error(whole.gradients[0], home.gradients[0]) <= limit
    assert error(weights(whole), weights(home)) <= (UPDATED if limit == LIMIT else 1e-3)
    for name in ("loss", "grad_norm", "learning_rate", "step", "epoch"):
        assert home.logged(name) == pytest.approx(whole.logged(name), rel=max(LOGGED, 100 * limit)), name
    assert home.trainer.state.global_step == len(home.gradients) == 20
    if task.needs == "trl":  # the look before the first cut does not count
        assert home.logged("num_tokens") == whole.logged("num_tokens")


@pytest.mark.parametrize("task", [one for one in TASKS if one.loss is None], ids=lambda task: task.name)
def test_accumulation_of_the_host_multiplies_the_batch(task: Task) -> None:
    limit = installed(task)
    whole, alone, both = [train(task, mode) for mode in ("whole", "alone", "both")]
    assert error(whole.gradients[0], both.gradients[0]) <= limit
    assert both.logged("loss") == pytest.approx(whole.logged("loss"), rel=LOGGED)
    assert len(both.gradients) == both.trainer.state.global_step == 2
    is_wrong = error(whole.gradients[0], alone.gradients[0]) > 1
    assert is_wrong == (task is OWN or task.name.startswith(("classification", "masked")))


class Dies(transformers.TrainerCallback):
    """Kills the process in the third micro-batch of the fourth update, two after a checkpoint."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 3:
            dies_at(2, more["model"])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize(("name", "mode"), [("classification", "home"), ("label smoothing", "both")])
def test_resume_after_a_kill_is_the_unbroken_run(name: str, mode: Any, tmp_path: Path) -> None:
    def dropping() -> nn.Module:
        model = homes.BY_NAME[name].model()
        for one in model.modules():
            one.p = 0.1 if isinstance(one, nn.Dropout) else None
        return model

    task = replace(homes.BY_NAME[name], model=dropping)
    more: dict[str, Any] = {"updates": 5, "save_strategy": "steps", "save_steps": 2}
    more["train_sampling_strategy"] = "random"
    folders = {one: str(tmp_path / one) for one in ("unbroken", "killed", "whole")}
    unbroken = train(task, mode, folder=folders["unbroken"], **more)
    assert was_killed(lambda: train(task, mode, folder=folders["killed"], callbacks=(Dies,), **more))
    train(task, "whole", folder=folders["whole"], **more)
    kept = [{one.name for one in Path(folders[of], "checkpoint-2").iterdir()} for of in ("killed", "whole")]
    assert kept[0] == kept[1]  # nothing of ours
    for of in (mode, "whole"):
        run = homes.trainer_of(task, of, **more)
        with quiet():
            run.trainer.train(resume_from_checkpoint=f"{folders['killed']}/checkpoint-2")
        assert len(run.gradients) == 3
        right = weights(unbroken)
        assert of == "whole" or all(torch.equal(one, right[name]) for name, one in weights(run).items())


@pytest.mark.parametrize("mode", ["home", "both"])
def test_out_of_memory_loses_no_update(mode: Any) -> None:
    """Four rows fit; the host divides by its accumulation steps."""

    def narrow(self: Any, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if len(inputs["labels"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return homes.Weighted.compute_loss(self, model, inputs)

    task = with_host(homes.Weighted, compute_loss=narrow, loss_is_scaled_for_ga=False)
    whole, home = train(OWN, "whole", updates=5), train(task, mode, updates=5, parts=2, micro_batch=None)
    assert home.trainer.state.global_step == 5
    assert error(whole.gradients[-1], home.gradients[-1]) <= LIMIT


def test_accumulation_broken_off_leaves_nothing_for_the_next_update() -> None:
    class Stops(transformers.TrainerCallback):
        stops = True

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop, self.stops = self.stops, False

    run = homes.trainer_of(OWN, "both", callbacks=(Stops,))
    for _ in range(2):
        with quiet():
            run.trainer.train()
    assert error(train(OWN, "whole").gradients[0], run.gradients[0]) <= LIMIT


def test_hosts_that_exchange_gradients_themselves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for holder, name, value, said in (
        (transformers.TrainingArguments, "n_gpu", 2, "torchrun --nproc-per-node 2"),
        (__import__("accelerate").Accelerator, "distributed_type", "DEEPSPEED", "got DEEPSPEED"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(holder, name, value)
            with pytest.raises(PlanError, match=said):
                homes.trainer_of(OWN, "home")


class Half(transformers.Trainer):
    """A host that computes in float16 on the CPU, where accelerate refuses it, with small gradients."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.state._mixed_precision = "fp16"
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * 2.0**-20


@pytest.mark.parametrize("mode", ["home", "both"])
@pytest.mark.parametrize("host", [transformers.Trainer, Half])
def test_sixteen_bits_of_the_host(mode: Any, host: type) -> None:
    task = Task("16 bits", lambda: CAUSAL.model().float(), "next", lambda: host)
    exact = train(Task("32 bits", task.model, "next"), "whole", updates=1).gradients[0]
    scale = 2.0**-4 if host is Half else 1.0  # of the loss, and of the host's GradScaler
    right = {name: one * scale for name, one in exact.items()}
    whole, home = [train(task, mode, bf16=host is not Half).gradients for mode in ("whole", mode)]
    assert 0 < error(right, home[0]) <= 2 * error(right, whole[0])
    assert len(home) == 2


def on_rank(rank: int, size: int, name: str, mode: Any) -> tuple[dict[str, Tensor], list[float]]:
    """The first gradient and the logged losses; micro-batches differ between ranks."""
    with as_rank(rank, size), quiet():
        run = train(homes.BY_NAME[name], mode, ranks=size, parts=2, micro_batch=2 + rank, ddp_backend="gloo")
        return run.gradients[0], run.logged("loss")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal LM", "masked LM", "label smoothing", "TRL SFT"])
def test_two_ranks_make_the_update_of_all_their_rows(name: str) -> None:
    limit, whole = installed(homes.BY_NAME[name]), train(homes.BY_NAME[name], "whole")
    with spawned(2) as ranks:
        for mode in ("home", "both"):
            for gradients, losses in ranks.run(on_rank, name, mode, seconds=240.0):
                assert error(whole.gradients[0], gradients) <= limit
                assert losses == pytest.approx(whole.logged("loss"), rel=LOGGED)


def in_a_tuple(self: Any, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
    return model(**inputs).loss, None


def half_divided(self: Any, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
    loss = model(**inputs).loss
    return loss + (0.0 if num_items_in_batch is None else loss / num_items_in_batch)


@pytest.mark.parametrize(("own", "said"), [(in_a_tuple, "got a tuple"), (half_divided, "Divide all of it")])
def test_losses_that_cannot_be_cut_are_refused(own: Any, said: str) -> None:
    run = homes.trainer_of(with_host(compute_loss=own), "home")
    with pytest.raises((LossError, PlanError), match=said), quiet():
        run.trainer.train()
    assert "compute_loss" not in vars(run.trainer)
    assert all(p.grad is None for p in run.trainer.model.parameters())


def test_contrastive_loss_names_the_way_out() -> None:
    task = homes.BY_NAME["contrastive"]
    with pytest.raises(LossError, match="WholeBatch") as caught, quiet():
        train(task, "home", loss=None)
    assert "argument `loss`" in caught.value.__notes__[-1]
    with pytest.raises(LossError, match="Expected the whole batch"), quiet():
        train(task, "both")


def test_documents_of_a_flat_sequence_are_rows() -> None:
    flatten = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)

    def flat_rows(rows: Any) -> dict[str, Any]:
        ids = [row["input_ids"][row["attention_mask"].bool()].tolist() for row in rows]
        return flatten([{"input_ids": one, "labels": one} for one in ids])

    own = {"data_collator": flat_rows}
    whole = train(CAUSAL, "whole", own=own)
    for run in (train(CAUSAL, "both", own=own, parts=2), train(CAUSAL, "home", own=own)):
        assert error(whole.gradients[1], run.gradients[1]) <= LIMIT
        assert run.logged("loss") == pytest.approx(whole.logged("loss"), rel=LOGGED)


def test_loss_whose_rows_meet_is_cut_where_that_is_said() -> None:
    """It subtracts a mean over all rows, in a sigmoid, as KTO's; the host counts."""

    def meeting(self: Any, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._total_train_tokens = self._total_train_tokens + len(inputs["labels"])
        values = model(**inputs).logits[:, 0]
        return torch.sigmoid(3 * (values - values.mean().detach())).nanmean()

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        transformers.Trainer.__init__(self, *args, **kwargs)
        self._total_train_tokens = 0

    task = with_host(compute_loss=meeting, __init__=begin)
    whole, home = train(task, "whole"), train(task, "home", own={"rows_meet": True})
    assert error(whole.gradients[1], home.gradients[1]) <= LIMIT
    assert home.trainer._total_train_tokens == 2 * homes.ROWS  # not those of each micro-batch
    with pytest.raises(LossError) as caught:
        train(task, "home")
    assert any("rows_meet=True" in note for note in caught.value.__notes__)


@pytest.mark.slow
def test_compiled_models_are_exact_or_refused_by_name() -> None:
    more: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    whole, home = train(CAUSAL, "whole"), train(CAUSAL, "home", **more)
    assert error(whole.gradients[1], home.gradients[1]) <= LIMIT
    with pytest.raises(LossError, match=r"BertFor.* outside of compiled code.*block\.compile\(\)"):
        train(homes.BY_NAME["classification"], "home", **more)  # its mean is inside the compiled code
