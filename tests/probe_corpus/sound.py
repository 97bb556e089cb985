"""All sound models: the gradient of the whole batch in every cut, whatever is drawn and padded on the way."""

from tests.probe_corpus import sound_layers, sound_losses, sound_sequences
from tests.probe_corpus.case import Make

SOUND: list[Make] = [*sound_layers.SOUND, *sound_losses.SOUND, *sound_sequences.SOUND]
