"""Models in which some experts are chosen for a token and others are shared by all, as DeepSeek's
are: their keys in config.json, and the names of their tensors."""

from collections.abc import Sequence

from ..specs import FeedForward, GroupedRouter, Mlp, Moe, Router, SharedExpert
from .checks import require
from .keys import DecoderKeys, Size
from .names import Rename, Rule, drop_layers

SHARED_NAMES = Rename(r"\.mlp\.shared_experts\.", ".mlp.shared_expert.")  # they are one


class RoutedKeys(DecoderKeys, kw_only=True, frozen=True):
    """What config.json says of the experts."""

    n_routed_experts: Size
    n_shared_experts: Size = 1
    moe_intermediate_size: Size
    num_experts_per_tok: Size
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    n_group: Size = 1
    topk_group: Size = 1

    def moe(self, router: Router) -> Moe:
        """The experts, with those that all tokens share as one."""
        width = self.moe_intermediate_size
        shared = Mlp(width=width * self.n_shared_experts, activation=self.activation)
        return Moe(
            num_experts=self.n_routed_experts,
            width=width,
            router=router,
            activation=self.activation,
            shared=SharedExpert(mlp=shared),
        )

    def feed_forwards(self, moe: Moe) -> list[FeedForward]:
        """Of each layer: the first ones are dense, the others have the experts."""
        return [
            self.mlp if index < self.first_k_dense_replace else moe
            for index in range(self.num_hidden_layers)
        ]

    def grouped_sigmoids(self, *, is_normed: bool) -> GroupedRouter:
        """The router that chooses by corrected sigmoids within the best groups. `is_normed`: the
        weights of the chosen add up to 1. Raises ConfigError where they do not."""
        require(is_normed, "norm_topk_prob false is not supported")
        self.check_groups()
        return GroupedRouter(
            top_k=self.num_experts_per_tok,
            num_groups=self.n_group,
            top_groups=self.topk_group,
            scaling=self.routed_scaling_factor,
        )

    def check_groups(self) -> None:
        """Raises ConfigError when the experts cannot be divided into the groups."""
        groups = self.n_group
        is_divided = self.n_routed_experts % groups == 0 and self.topk_group <= groups
        require(
            is_divided, f"n_group {groups} and topk_group {self.topk_group} do not fit the experts"
        )


def drafting_names(keys: RoutedKeys) -> Sequence[Rule]:
    """Behind the last layer stands the one that predicts a second token; it is not run."""
    return (drop_layers(keys.num_hidden_layers, 1), SHARED_NAMES)
