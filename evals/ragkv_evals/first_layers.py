"""A model cut to its first layers: layers that are alike cost alike, so a few of them show the ratios in less time."""

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from transformers import AutoModelForCausalLM, AutoTokenizer

from ragkv.errors import ConfigError


@contextmanager
def first_layers(folder: str, layers: int) -> Iterator[str]:
    """A temporary folder with the first `layers` layers of the model in `folder`.

    Raises:
        ConfigError: the model has fewer.
    """
    model = AutoModelForCausalLM.from_pretrained(folder)
    decoder, config = model.get_decoder(), model.config  # type: ignore[no-untyped-call]
    if not 1 <= layers <= len(decoder.layers):
        raise ConfigError(f"--layers={layers}: the model has {len(decoder.layers)}; name from 1 to that many")
    decoder.layers = decoder.layers[:layers]
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    with TemporaryDirectory(prefix="ragkv-layers-") as cut:
        model.save_pretrained(cut)
        AutoTokenizer.from_pretrained(folder).save_pretrained(cut)
        del model, decoder
        yield cut
