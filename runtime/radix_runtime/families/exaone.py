"""EXAONE 4."""

from ..specs import HeadNorm, Layer, ModelSpec
from .family import Family
from .keys import DecoderKeys, Size, windows_of_types
from .olmo import names


class Exaone4Keys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of EXAONE 4. `sliding_window_pattern`: every so many layers one has no window, or
    a string of L and G (local, global) that is repeated."""

    rms_norm_eps: float = 1e-5
    sliding_window: Size | None = 4096
    sliding_window_pattern: int | str | None = 4
    layer_types: list[str] | None = None

    @property
    def types(self) -> list[str]:
        """The type of each layer."""
        if self.layer_types is not None:
            return self.layer_types
        pattern = self.sliding_window_pattern
        if self.sliding_window is None or not pattern:
            return ["full_attention"] * self.num_hidden_layers
        if isinstance(pattern, int):
            pattern = "L" * (pattern - 1) + "G"
        kinds = {"L": "sliding_attention", "G": "full_attention"}
        letters = [pattern[i % len(pattern)] for i in range(self.num_hidden_layers)]
        return [kinds.get(letter, letter) for letter in letters]


def read(keys: Exaone4Keys) -> ModelSpec:
    """Norms after the blocks; where some layers have a window, the others have no positions."""
    rope = keys.rope()
    windows = windows_of_types(keys.types, keys.sliding_window, keys.num_hidden_layers)
    is_hybrid = keys.sliding_window is not None
    return keys.model(
        Layer(
            mixer=keys.gqa(
                rope=None if is_hybrid and window is None else rope,
                window=window,
                qk_norm=HeadNorm(norm=keys.norm),
            ),
            feed_forward=keys.mlp,
            pre_norm=None,
            post_norm=keys.norm,
        )
        for window in windows
    )


EXAONE4 = Family(keys=Exaone4Keys, read=read, names=names)
