# The binding as the Python layer calls it: positional, in the order of the public function, then
# its outputs; optional tensors are None. An op whose function is missing runs the reference.

from typing import Any

abi_version: int
version: str
backend: str

def isa() -> str: ...
def set_bundled_hip(paths: list[str]) -> None: ...
def hip_runtime() -> tuple[str, str]: ...
def set_num_threads(n: int, pin: bool) -> None: ...
def get_num_threads() -> int: ...
def rmsnorm(input: Any, weight: Any, eps: float, out: Any) -> None: ...
def fused_add_rmsnorm(input: Any, residual: Any, weight: Any, eps: float) -> None: ...
def layernorm(input: Any, weight: Any, bias: Any, eps: float, out: Any) -> None: ...
def apply_rope_inplace(
    positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool
) -> None: ...
def fused_qk_norm_rope_store(
    q: Any,
    k: Any,
    v: Any,
    q_weight: Any,
    k_weight: Any,
    cos_sin_cache: Any,
    positions: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    eps: float,
    is_neox: bool,
    k_scale: Any,
    v_scale: Any,
) -> None: ...
def silu_and_mul(input: Any, out: Any) -> None: ...
def gelu_and_mul(input: Any, out: Any) -> None: ...
def gelu_tanh_and_mul(input: Any, out: Any) -> None: ...
def store_kv_cache(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, k_scale: Any, v_scale: Any
) -> None: ...
def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    page_table: Any,
    kv_lens: Any,
    cu_seqlens_q: Any,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: Any,
    out: Any,
    lse: Any,
    k_scale: Any,
    v_scale: Any,
    workspace: Any,
    max_seqlen_q: int,
    q_scale: Any,
    any_split: bool,
) -> None: ...
def flash_attn_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: Any,
    out: Any,
    lse: Any,
    k_scale: Any,
    v_scale: Any,
    workspace: Any,
    max_seqlen_q: int,
    q_scale: Any,
) -> None: ...
def flash_attn_workspace_size(
    tokens: int,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    max_pages: int,
    max_seqlen_q: int,
) -> int: ...
def merge_state(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any, lse: Any) -> None: ...

# Layers come as tuples: qkv, o, gate_up, down, qkv_bias, input_norm, post_norm, q_norm, k_norm,
# k_cache, v_cache, router, qkv_scale, o_scale, gate_up_scale, down_scale.
class PersistentDecoder:
    def __init__(
        self,
        layers: list[tuple[Any, ...]],
        final_norm: Any,
        cos_sin_cache: Any,
        heads: int,
        kv_heads: int,
        eps: float,
        qk_eps: float,
        softmax_scale: float,
        top_k: int,
        renormalize: bool,
    ) -> None: ...
    def workspace_size(self) -> int: ...
    def max_tokens(self) -> int: ...
    def prepare(self, workspace: Any) -> None: ...
    def run(
        self, hidden: Any, positions: Any, slot_mapping: Any, page_table: Any, kv_lens: Any
    ) -> None: ...

# Columns come as (buffer, first, count), packed weights as (description, data, bias or None),
# caches as (k, v, scales of k, of v).
class Decoder:
    def __init__(self, buffers: list[tuple[int, str]]) -> None: ...
    def add_rmsnorm(self, x: Any, out: Any, weight: Any, eps: float) -> None: ...
    def add_linear(
        self, x: Any, out: Any, residual: Any, weight: tuple[Any, ...], gate: int
    ) -> None: ...
    def add_rope_store(
        self,
        places: tuple[Any, ...],
        cache: tuple[Any, ...],
        tensors: tuple[Any, ...],
        eps: float,
        is_neox: bool,
    ) -> None: ...
    def add_attention(
        self,
        q: Any,
        out: Any,
        cache: tuple[Any, ...],
        sinks: Any,
        softmax_scale: float,
        softcap: float,
        window_left: int,
    ) -> None: ...
    def add_gated_activation(self, x: Any, out: Any, activation: int) -> None: ...
    def add_add(self, to: int, x: int, scale: Any, factor: float) -> None: ...
    def add_scale(self, x: Any, factors: Any) -> None: ...
    def add_route(
        self,
        places: tuple[Any, ...],
        bias: Any,
        router: int,
        renormalize: bool,
        groups: tuple[int, int],
        scaling: float,
    ) -> None: ...
    def add_experts(
        self,
        places: tuple[Any, ...],
        experts: Any,
        biases: tuple[Any, Any],
        gating: tuple[int, float, float],
    ) -> None: ...
    def add_latent_store(
        self, places: tuple[Any, ...], heads: int, tensors: tuple[Any, Any], is_neox: bool
    ) -> None: ...
    def add_latent_attention(
        self,
        places: tuple[Any, Any],
        weights: tuple[PackedHeads, PackedHeads],
        cache: Any,
        softmax_scale: float,
    ) -> None: ...
    def add_latent_prefill(
        self,
        places: tuple[Any, Any],
        heads: int,
        weight: tuple[PackedDesc, Any],
        cache: Any,
        softmax_scale: float,
    ) -> None: ...
    def workspace_size(
        self,
        hidden: Any,
        page_table: Any,
        kv_lens: Any,
        cu_seqlens_q: Any,
        max_seqlen_q: int,
        num_expanded: int,
    ) -> int: ...
    def run(
        self,
        hidden: Any,
        positions: Any,
        slot_mapping: Any,
        page_table: Any,
        kv_lens: Any,
        cu_seqlens_q: Any,
        max_seqlen_q: int,
        num_expanded: int,
        workspace: Any,
    ) -> None: ...

class PackedHeads:
    def __init__(self, weights: list[tuple[PackedDesc, Any]]) -> None: ...
    def run(self, x: Any, out: Any) -> None: ...

class PackedExperts:
    def __init__(
        self, weights: list[tuple[tuple[PackedDesc, Any], tuple[PackedDesc, Any]]]
    ) -> None: ...
    def workspace_size(self, hidden_states: Any, topk_ids: Any) -> int: ...
    def run(
        self,
        hidden_states: Any,
        topk_weights: Any,
        topk_ids: Any,
        bias1: Any,
        bias2: Any,
        gating: tuple[int, float, float],
        expert_map: Any,
        out: Any,
        workspace: Any,
    ) -> None: ...

# A packed weight [n, k]: kind is 0 dense, 1 int8, 2 int4, 3 w8a8, 4 w4a8; dtypes by name. The
# library checks that data is uint8 [nbytes].
class PackedDesc:
    nbytes: int
    layout: str
    def __init__(
        self,
        n: int,
        k: int,
        dtype: str,
        kind: int,
        group: int,
        scale_dtype: str,
        zeros: bool,
        mins: bool,
    ) -> None: ...

def pack_weight(
    w: Any,
    scales: Any,
    zeros: Any,
    mins: Any,
    sub_scales: Any,
    sub_mins: Any,
    desc: PackedDesc,
    data: Any,
) -> None: ...
def unpack_weight(
    data: Any,
    desc: PackedDesc,
    w: Any,
    scales: Any,
    zeros: Any,
    mins: Any,
    sub_scales: Any,
    sub_mins: Any,
) -> None: ...
def linear_packed(
    x: Any,
    packed: Any,
    desc: PackedDesc,
    bias: Any,
    residual: Any,
    gate: int,
    out: Any,
    keep_x: bool = False,
) -> None: ...
def linear_argmax(x: Any, data: Any, desc: PackedDesc, ids: Any, maxima: Any) -> None: ...

# ids: None on a GPU stands for all rows.
def embedding_packed(ids: Any | None, data: Any, desc: PackedDesc, out: Any) -> None: ...

# Row-major weights on Hopper; gate: 0 none, 1 halves, 2 interleaved.
def linear_dense(
    x: Any, weight: Any, bias: Any, residual: Any, gate: int, static_weight: bool, out: Any
) -> None: ...
def fp8_scaled_mm(
    mat_a: Any,
    mat_b: Any,
    scales_a: Any,
    scales_b: Any,
    bias: Any,
    gate: int,
    static_weight: bool,
    fast_accum: bool,
    out: Any,
) -> None: ...
def int8_scaled_mm(
    mat_a: Any,
    mat_b: Any,
    scales_a: Any,
    scales_b: Any,
    azp: Any,
    b_sums: Any,
    bias: Any,
    gate: int,
    static_weight: bool,
    out: Any,
) -> None: ...

# The same beside Hopper; gate: 0.
def fp8_scaled_mm_sm89(
    mat_a: Any,
    mat_b: Any,
    scales_a: Any,
    scales_b: Any,
    bias: Any,
    gate: int,
    static_weight: bool,
    fast_accum: bool,
    out: Any,
) -> None: ...
def fp8_scaled_mm_sm100(
    mat_a: Any,
    mat_b: Any,
    scales_a: Any,
    scales_b: Any,
    bias: Any,
    gate: int,
    static_weight: bool,
    fast_accum: bool,
    out: Any,
) -> None: ...
def int8_scaled_mm_sm80(
    mat_a: Any,
    mat_b: Any,
    scales_a: Any,
    scales_b: Any,
    azp: Any,
    b_sums: Any,
    bias: Any,
    gate: int,
    static_weight: bool,
    out: Any,
) -> None: ...
def fp8_blockwise_scaled_mm(
    mat_a: Any, mat_b: Any, scales_a: Any, scales_b: Any, static_weight: bool, out: Any
) -> None: ...
def bmm_fp8(A: Any, B: Any, A_scale: Any, B_scale: Any, out: Any) -> None: ...
def per_tensor_quant_fp8(input: Any, is_static: bool, out: Any, scale: Any) -> None: ...
def per_token_quant_fp8(
    input: Any, group_size: int, gated: bool, out: Any, scales: Any
) -> None: ...
def rmsnorm_quant_fp8(
    input: Any, residual: Any, weight: Any, group_size: int, eps: float, out: Any, scales: Any
) -> None: ...
def per_token_quant_int8(input: Any, gated: bool, out: Any, scales: Any) -> None: ...
def rmsnorm_quant_int8(
    input: Any, residual: Any, weight: Any, eps: float, out: Any, scales: Any
) -> None: ...
def topk_softmax(
    gating_output: Any,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    num_fused_shared_experts: int,
    routed_scaling_factor: float,
    topk_weights: Any,
    topk_ids: Any,
) -> None: ...
def topk_sigmoid(
    gating_output: Any,
    renormalize: bool,
    correction_bias: Any,
    num_fused_shared_experts: int,
    topk_weights: Any,
    topk_ids: Any,
) -> None: ...
def moe_fused_gate(
    input: Any,
    bias: Any,
    num_expert_group: int,
    topk_group: int,
    routed_scaling_factor: float,
    num_fused_shared_experts: int,
    topk_weights: Any,
    topk_ids: Any,
) -> None: ...
def moe_align_block_size(
    topk_ids: Any,
    num_experts: int,
    block_size: int,
    expert_map: Any,
    sorted_token_ids: Any,
    expert_ids: Any,
    num_tokens_post_padded: Any,
) -> None: ...
def moe_sum(input: Any, out: Any) -> None: ...
def fused_experts(
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    w1_scale: Any,
    w2_scale: Any,
    expert_map: Any,
    out: Any,
    workspace: Any,
    use_fp8_w8a8: bool,
) -> None: ...
def fused_experts_mixed(
    hidden_states: Any,
    w1: Any,
    w2: Any,
    bias1: Any,
    bias2: Any,
    topk_weights: Any,
    topk_ids: Any,
    expert_map: Any,
    out: Any,
    workspace: Any,
    kind: int,
    group: int,
    zeros: bool,
    scale_dtype: str,
    inter_size: int,
    activation: int,
    alpha: float,
    limit: float,
) -> None: ...
def fused_experts_workspace_size(
    tokens: int, topk: int, named_experts: int, hidden_size: int, inter_size: int
) -> int: ...
def m_grouped_gemm_contiguous(
    x: Any,
    weight: Any,
    groups: Any,
    expected_m: int,
    x_scale: Any,
    weight_scale: Any,
    out: Any,
    workspace: Any,
) -> None: ...
def m_grouped_gemm_masked(
    x: Any,
    weight: Any,
    groups: Any,
    expected_m: int,
    x_scale: Any,
    weight_scale: Any,
    out: Any,
    workspace: Any,
) -> None: ...
def m_grouped_gemm_workspace_size(fp8: bool, rows: int, groups: int, k: int) -> int: ...
def apply_penalties_inplace(
    logits: Any, counts: Any, slots: Any, repetition: Any, frequency: Any, presence: Any
) -> None: ...
def count_tokens_inplace(counts: Any, slots: Any, ids: Any) -> None: ...
def fill_step_tensors(
    entries: Any,
    tokens: Any,
    sample_tokens: Any,
    next_token: Any,
    committed_len: Any,
    row_pages: Any,
    page_size: int,
    kv_lens: Any,
    input_ids: Any,
    positions: Any,
    slot_mapping: Any,
    page_table: Any,
    sample_positions: Any,
) -> None: ...
def accept_tokens(
    ids: Any,
    rows: Any,
    grow_rows: Any,
    next_token: Any,
    committed_len: Any,
    cu_samples: Any,
    drafts: Any,
    all_drawn: bool,
    counts: Any,
) -> None: ...
def sampling_workspace_size(rows: int, columns: int) -> int: ...
def top_k_top_p_sampling(
    logits: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,
    position: Any,
    stream: int,
    out: Any,
    workspace: Any,
    edits: tuple[Any, ...] | None,
    logprobs: tuple[Any, ...] | None,
) -> None: ...
def sampling_candidates(
    logits: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,
    position: Any,
    stream: int,
    first_id: int,
    vocab_size: int,
    records: Any,
    workspace: Any,
    edits: tuple[Any, ...] | None,
) -> None: ...
def sample_candidates(
    records: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,
    position: Any,
    stream: int,
    vocab_size: int,
    out: Any,
) -> None: ...
def token_logprobs(
    logits: Any, ids: Any, logprob: Any, top_logprobs: Any, top_ids: Any, workspace: Any
) -> None: ...
def store_mla_kv(latent: Any, rope: Any, kv_cache: Any, slot_mapping: Any) -> None: ...
def gather_mla_kv(
    kv_cache: Any, page_table: Any, cu_seqlens: Any, starts: Any, out: Any
) -> None: ...
def concat_mla_k(k: Any, k_nope: Any, k_rope: Any) -> None: ...
def mla_decode(
    q_nope: Any,
    q_rope: Any,
    kv_cache: Any,
    page_table: Any,
    kv_lens: Any,
    cu_seqlens_q: Any,
    softmax_scale: float,
    causal: bool,
    out: Any,
    lse: Any,
    workspace: Any,
    max_seqlen_q: int,
    any_split: bool,
) -> None: ...
def mla_decode_workspace_size(
    tokens: int,
    batch: int,
    heads: int,
    page_size: int,
    max_pages: int,
    max_seqlen_q: int,
    any_split: bool,
    kv_item_size: int,
) -> int: ...
