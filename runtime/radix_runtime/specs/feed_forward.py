"""Feed-forwards: one MLP for all tokens, or a mixture of experts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiGlu:
    """(min(gate, limit) * sigmoid(alpha * min(gate, limit))) * (1 + clamp(up, -limit, limit))."""

    alpha: float
    limit: float


Activation = str | ClampedSwiGlu


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """down(activation(gate(x)) * up(x)), `width` wide inside. `activation`: silu, gelu or
    gelu_tanh."""

    width: int
    activation: str = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxRouter:
    """The `top_k` experts of the largest logits. Their weights are the softmax over all experts, or
    with `renormalize` over the chosen ones. `bias`: the logits have one."""

    top_k: int
    renormalize: bool
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidRouter:
    """The `top_k` experts of the largest sigmoid(logit) + correction, where the correction, one
    number for each expert, only chooses. Their weights are the sigmoids, divided by their sum."""

    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRouter:
    """SigmoidRouter within the `top_groups` best of `num_groups` equal ranges of experts; a range
    is as good as the sum of its two best. The weights are multiplied by `scaling`."""

    top_k: int
    num_groups: int
    top_groups: int
    scaling: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedSoftmaxRouter:
    """SoftmaxRouter over all experts, of which those in the `top_groups` best of `num_groups` equal
    ranges are chosen; a range is as good as its best. The weights are multiplied by `scaling`."""

    top_k: int
    num_groups: int = 1
    top_groups: int = 1
    scaling: float = 1.0


Router = SoftmaxRouter | SigmoidRouter | GroupedRouter | GroupedSoftmaxRouter


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """An MLP that every token passes beside its experts. `gated`: weighed by the sigmoid of one
    more product of the token."""

    mlp: Mlp
    gated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """The weighted sum of `router.top_k` of `num_experts` gated MLPs, each `width` wide inside."""

    num_experts: int
    width: int
    router: Router
    activation: Activation = "silu"
    bias: bool = False
    shared: SharedExpert | None = None
