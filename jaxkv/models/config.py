"""Architecture of a model: plain values, frozen, hashable and validated."""

import dataclasses
import warnings
from typing import Literal

from jaxkv import validation
from jaxkv.models.huggingface import FAMILIES


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies for contexts longer than those of training.

    Source: Llama-3's report, section 3.4.2; "linear": Chen et al. 2023,
    arXiv:2306.15595, section 3.2; "yarn": Peng et al. 2023, arXiv:2309.00071, section
    3; "longrope": Ding et al. 2024, arXiv:2402.13753, section 3.
    """

    kind: Literal["llama3", "linear", "yarn", "longrope", "proportional"] = "llama3"
    """"llama3" divides low frequencies by `factor`; "linear" divides all of them and
        ignores the remaining fields; "yarn" divides low frequencies, and scales cosines
        and sines by `magnitude`; "longrope" divides each frequency by its own factor,
        and scales as "yarn"; "proportional" turns the first `num_pairs` pairs of
        features, and divides as "linear" (Gemma 4)."""
    factor: float = 8.0
    low_frequency_factor: float = 1.0
    """Rotations over the original positions below which a frequency is divided
    ("llama3"; `beta_slow` of "yarn")."""
    high_frequency_factor: float = 4.0
    """Rotations over the original positions above which a frequency is kept ("llama3";
    `beta_fast` of "yarn")."""
    original_max_positions: int = 8192
    magnitude: float = 1.0
    """Factor on cosines and sines ("yarn", "longrope")."""
    factors: tuple[float, ...] = ()
    """Divisor of each frequency ("longrope")."""
    long_factors: tuple[float, ...] = ()
    """Divisors for sequences past `max_positions`, which are kept for saved folders."""
    max_positions: int | None = None
    """Length up to which `factors` hold; a longer sequence needs others, and is
    refused. None means any length ("longrope")."""
    truncate: bool = True
    """True if the ramp between kept and divided frequencies begins and ends at a whole
    pair of features ("yarn")."""
    num_pairs: int = 0
    """Pairs of features that turn ("proportional")."""
    score_magnitude: float = 1.0
    """Factor on queries and on keys: scores are scaled by its square, in addition to
    `magnitude` (DeepSeek's `mscale_all_dim` with "yarn")."""

    def __post_init__(self):
        """Validates the fields."""
        validation.check_fields(self, num_pairs=0)


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionKind:
    """What the attention of some layers has of its own; other fields are the model's.

    Source: layers of two kinds, Gemma 2, arXiv:2408.00118, section 2; layers without
    positions (NoPE), Yang et al. 2025, arXiv:2501.18795, section 3; recurrent layers
    between those with attention, Kimi Linear, arXiv:2510.26692, section 4.
    """

    window: int | None = None
    """Sliding window: number of latest tokens that a query sees, itself included."""
    positions: Literal["rope", "learned", "none"] = "rope"
    """Learned positions are added to the embeddings, and "none" are no positions."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_places: Literal["before", "after", "both"] | None = None
    """As in `ModelConfig`; None means that of the model."""
    is_recurrent: bool = False
    """True if `ModelConfig.recurrence` takes the place of attention."""
    head_dim: int | None = None
    """As in `ModelConfig`, as the next three; None means that of the model."""
    num_kv_heads: int | None = None
    keys_are_values: bool | None = None
    mlp_size: int | None = None
    shares_kv: bool = False
    """True if the layers read K and V of the last earlier layer of the kind that is
    equal but for this and for `mlp_size`, and have none (Gemma 3n and 4)."""
    feed_forward: Literal["mlp", "experts"] | None = None
    """The only branch of layers without attention; needs `residual="single"`."""

    def __post_init__(self):
        """Validates the fields."""
        validation.check_fields(self)
        if self.is_recurrent and self.feed_forward is not None:
            raise ValueError(
                f"feed_forward={self.feed_forward!r} must be None in recurrent layers"
            )

    @property
    def has_attention(self) -> bool:
        """True if the layers have K and V."""
        return not self.is_recurrent and self.feed_forward is None


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrenceConfig:
    """A recurrence with a state of fixed size in place of attention.

    Every value head has a state `[key_dim, value_dim]`. A token scales it, adds the
    product of its key and value, and reads it with its query. Queries, keys and values
    pass a causal convolution over `kernel_size` tokens first. A short convolution has
    nothing but the convolution, of products of two projections: its state is the latest
    inputs.

    Source: gated delta rule (GDN), Yang et al. 2024, arXiv:2412.06464, section 3.1;
    Kimi delta attention (KDA), Kimi Linear, arXiv:2510.26692, section 3; Mamba 2, Dao
    and Gu 2024, arXiv:2405.21060, section 5, whose B, C and x are keys, queries and
    values; short convolutions, LFM2, arXiv:2511.23404.
    """

    kind: Literal["gdn", "kda", "mamba2", "conv"] = "gdn"
    """"gdn": one decay for each head, and the delta rule; "kda": one for each feature
        of a key; "mamba2": one for each head, and no delta rule; "conv": a short
        convolution, with one head of `value_dim` channels."""
    num_key_heads: int
    """Heads of queries and keys (groups of B and C in Mamba 2)."""
    num_value_heads: int
    """Heads of values, a multiple of `num_key_heads`; consecutive ones share a key."""
    key_dim: int
    """Width of a key (the state size of Mamba 2)."""
    value_dim: int
    """Width of a value."""
    kernel_size: int = 4
    """Tokens that the convolution reads, the current one included."""
    conv_bias: bool = False
    projection_bias: bool = False
    """True if the projections have biases ("mamba2", "conv")."""
    activation: str = "silu"
    """Activation after the convolution, a name of `ModelConfig.activation`."""
    write_scale: float = 1.0
    """Factor on the strength, in [0, 1], with which a token overwrites: 2 allows
    negative eigenvalues (Grazzi et al. 2024, arXiv:2411.12537)."""
    min_step: float = 0.0
    """Smallest step size of a token ("mamba2")."""
    max_step: float | None = None
    """Largest step size; None means no bound ("mamba2")."""
    norm_eps: float = 1e-6
    """Added to the mean of squares in the norm of the output."""

    def __post_init__(self):
        """Validates the fields."""
        validation.check_fields(self, min_step=0)
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads={self.num_value_heads} must be a multiple of "
                f"num_key_heads={self.num_key_heads}"
            )
        if self.kind == "conv":
            for name in ("num_value_heads", "key_dim"):
                if (value := getattr(self, name)) != 1:
                    raise ValueError(f"{name}={value} must be 1 with kind='conv'")

    @property
    def num_channels(self) -> int:
        """Width of the convolution: queries, keys and values of all heads."""
        if self.kind == "conv":
            return self.num_outputs
        return (
            2 * self.num_key_heads * self.key_dim
            + self.num_value_heads * self.value_dim
        )

    @property
    def num_outputs(self) -> int:
        """Width of the output: values of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def num_decays(self) -> int:
        """Number of decays of a token."""
        return self.num_value_heads * (self.key_dim if self.kind == "kda" else 1)


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts (MoE) in place of the MLP; each token uses `top_k` experts.

    Source: Jiang et al. 2024, Mixtral of Experts, arXiv:2401.04088, section 2; shared
    experts: Dai et al. 2024, DeepSeekMoE, arXiv:2401.06066, section 3.2; groups:
    DeepSeek-V2, arXiv:2405.04434, section 2.2.2; sigmoid scores and the selection bias:
    DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """

    num_experts: int
    top_k: int
    """Number of experts of a token, those with the largest selection scores."""
    size: int
    """FFN width of an expert."""
    shared_size: int = 0
    """Total FFN width of the shared experts, which every token uses in addition."""
    shared_gate: bool = False
    """True if a sigmoid gate scales each token's shared part (Qwen2)."""
    latent_size: int | None = None
    """Width of a projection that is the input of the routed experts, and of the sum of
    their outputs; None means the hidden size (Nemotron 3)."""
    renormalise: bool = True
    """True if the probabilities of the chosen experts are scaled to sum to one."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's logits to the scores of the experts."""
    sum_eps: float = 1e-20
    """Added to the sum of the chosen scores before they are renormalised ("sigmoid").
    """
    beside_mlp: bool = False
    """True if layers have an MLP in addition, with norms of its own for the input of
    the experts and for both outputs. The router reads the residual stream by a norm of
    its own, and scales the share of each expert (Gemma 4)."""
    router_bias: bool = False
    """True if a bias for each expert is added to the router's logits (gpt-oss)."""
    expert_bias: bool = False
    """True if the products of an expert have biases (gpt-oss)."""
    gate_bias: bool = False
    """True if a bias for each expert is added to its score for selection; the share of
    a chosen expert excludes it. The score of a group is then the sum of its two largest
    selection scores, else the largest one."""
    num_groups: int = 1
    """Number of equal groups of consecutive experts."""
    top_groups: int = 1
    """Number of groups, those with the largest scores, from which a token's experts are
    chosen."""
    scale: float = 1.0
    """Factor on the shares of the routed experts."""
    num_dense_layers: int = 0
    """Number of first layers that have an MLP."""
    balance_weight: float = 0.01
    """Weight of the load-balancing loss in training; 0.01 in Fedus et al. 2021,
    arXiv:2101.03961, section 2.2."""
    bias_rate: float = 0.0
    """Change of the selection bias in each training step: up for experts with less than
    the mean load, down for experts with more; 0.001 in DeepSeek-V3, section 4.2."""

    def __post_init__(self):
        """Validates the fields."""
        validation.check_fields(
            self, shared_size=0, num_dense_layers=0, balance_weight=0, bias_rate=0
        )
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k={self.top_k} must be at most num_experts={self.num_experts}"
            )
        if self.shared_gate and not self.shared_size:
            raise ValueError(f"shared_gate={self.shared_gate!r} needs shared experts")
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_experts={self.num_experts} must be a multiple of "
                f"num_groups={self.num_groups}"
            )
        size = self.num_experts // self.num_groups
        if (
            not self.top_groups <= self.num_groups
            or self.top_groups * size < self.top_k
        ):
            raise ValueError(
                f"top_groups={self.top_groups} must be at most "
                f"num_groups={self.num_groups}, with top_k={self.top_k} experts or more"
            )
        if self.gate_bias and self.num_groups > 1 and size < 2:
            raise ValueError(
                f"num_groups={self.num_groups} must leave 2 experts or more in a group"
            )
        if self.bias_rate and not self.gate_bias:
            raise ValueError(f"bias_rate={self.bias_rate} needs gate_bias=True")


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (MLA).

    Keys and values of all heads are projections of one latent per token. The cache of a
    token is the latent and one rotary key, `kv_rank + rope_dim` numbers per layer.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    kv_rank: int
    """Width of the latent."""
    q_rank: int | None = None
    """Width of the compressed query; None for queries without compression."""
    nope_dim: int
    """Part of a query or key head without positions."""
    rope_dim: int
    """Rotary part of a query head, and of the key that all heads share; even."""
    value_dim: int
    """Width of a value head."""
    latent_eps: float | None = None
    """Added to the mean of squares in the norms of the latent and of the compressed
    query; None means `ModelConfig.norm_eps` (Kimi Linear: 1e-6)."""

    def __post_init__(self):
        """Validates the fields."""
        validation.check_fields(self)
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim={self.rope_dim} must be even")


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder-only transformer; hashable, so a static argument."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    """Width of the gate and up projections, or of the single projection if not gated.
    Layers with experts use the widths in `experts`."""
    max_positions: int
    """Longest sequence of the model in tokens; a hard bound with learned positions."""
    norm: Literal["rms", "layer", "rms_offset", "rms_plain"] = "rms"
    """RMS norm or layer norm; "rms_offset" scales by 1 plus its weight (Gemma), and
    "rms_plain" has no weight (nanochat)."""
    norm_eps: float = 1e-5
    norm_places: Literal["before", "after", "both"] = "before"
    """Norms before attention and MLP, after them and before they are added (OLMo 2), or
    both (Gemma 2)."""
    residual: Literal["serial", "parallel", "single"] = "serial"
    """"parallel": attention and MLP have the same input (GPT-NeoX); "single": a layer
        has one branch, attention, a recurrence, an MLP or experts (Nemotron-H)."""
    residual_scale: float = 1.0
    """Factor on the outputs of attention and MLP before they are added (Granite)."""
    embed_scale: float = 1.0
    """Factor on the embeddings of tokens, rounded to their dtype."""
    embed_norm: bool = False
    """True if the input of the first layer is the norm, without weights, of the
    embeddings (nanochat)."""
    logit_scale: float = 1.0
    """Factor on the logits."""
    logit_cap: float | None = None
    """Bound c of the logits x, as c tanh(x / c) (Gemma 2); None means no bound."""
    positions: Literal["rope", "learned", "none"] = "rope"
    position_offset: int = 0
    """Rows of the learned position table before position 0 (OPT: 2)."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rotary_size: int | None = None
    """Number of features of a head that encode positions, as in the exponents of the
    rotary frequencies; None means all. Pairs of the remaining features do not turn."""
    attention_scale: float | None = None
    """Factor on the products of queries and keys; None means head_dim ** -0.5."""
    score_cap: float | None = None
    """Bound of the scores, as `logit_cap` (Gemma 2)."""
    score_growth: float | None = None
    """Factor b of a query's scale 1 + b log(1 + floor(position / original_max_positions
    of `rope_scaling`)) (Llama 4, Ministral 3); None means 1 everywhere."""
    sinks: bool = False
    """True if each query head has the score of one more key with value 0 (gpt-oss)."""
    activation: Literal[
        "silu", "gelu", "gelu_tanh", "relu", "relu_squared", "clamped_swiglu"
    ] = "silu"
    """"clamped_swiglu": (up + 1) gate sigmoid(`activation_slope` gate), with gate at
        most `activation_limit`, and up in +- that (gpt-oss)."""
    activation_slope: float = 1.702
    activation_limit: float = 7.0
    gated: bool = True
    """True if the MLP multiplies the activation by a second projection (SwiGLU)."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """True if queries and keys have an RMS norm before RoPE."""
    qk_norm_over: Literal["head", "layer"] = "head"
    """That norm is over head_dim of every head (Qwen3), or over all heads of a layer
    (OLMo 2)."""
    keys_are_values: bool = False
    """True if values are the projections of keys, without the weights of their norm and
    without positions (Gemma 4)."""
    value_norm: bool = False
    """True if values have that norm too, without weights (Gemma 4)."""
    layer_input_size: int = 0
    """Width of a further embedding of a token for each layer, which a gated projection
    adds to the layer's output (Gemma 3n and 4); 0 means none."""
    layer_scale: bool = False
    """True if a number of each layer scales its output (Gemma 4)."""
    out_gate: bool = False
    """True if the sigmoid of a projection scales the output of attention
    (Qwen3-Next)."""
    tie_embeddings: bool = True
    window: int | None = None
    """Sliding window: number of latest tokens that a query sees, itself included."""
    other_attention: tuple[AttentionKind, ...] = ()
    """Kinds 1, 2, ... of attention; kind 0 has this config's window and positions."""
    attention_pattern: tuple[int, ...] = (0,)
    """Kind of attention of each layer, repeated up to `num_layers`."""
    recurrence: RecurrenceConfig | None = None
    """The recurrence of recurrent layers; None for a model without one."""
    latent: LatentConfig | None = None
    """Latent attention in place of KV heads: `num_kv_heads` is then `num_q_heads`, and
    `head_dim` is `latent.nope_dim + latent.rope_dim`."""
    num_ahead_layers: int = 0
    """Layers for multi-token prediction, in addition to `num_layers` (DeepSeek-V3,
    section 2.2)."""
    experts: Experts | None = None
    """Experts in place of the MLP, except in the first dense layers; None for a dense
    model."""
    family: str = "llama"
    """Family whose names a saved folder uses, one of `models.FAMILIES`; it does not
    affect the computation."""

    def __post_init__(self):
        """Validates the fields."""
        validation.check_fields(
            self, position_offset=0, num_ahead_layers=0, layer_input_size=0
        )
        if self.family not in FAMILIES:
            raise ValueError(
                f"family={validation.format_value(self.family)} must be a name in "
                "models.FAMILIES, such as 'llama'; register_family adds one"
            )
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads={self.num_q_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        for kind in self.rotary_kinds:
            if (width := kind.head_dim or self.rotary_dim) % 2:
                raise ValueError(f"head_dim={width} must be even for rotary positions")
        self._check_attention()
        if (latent := self.latent) is not None:
            width = latent.nope_dim + latent.rope_dim
            for name, value, needed in (
                ("num_kv_heads", self.num_kv_heads, self.num_q_heads),
                ("head_dim", self.head_dim, width),
                ("qk_norm", self.qk_norm, False),
                ("qkv_bias", self.qkv_bias, False),
                ("out_gate", self.out_gate, False),
                ("window", self.window, None),
                ("rotary_size", self.rotary_size, None),
                ("sinks", self.sinks, False),
                ("score_cap", self.score_cap, None),
                ("score_growth", self.score_growth, None),
                ("keys_are_values", self.keys_are_values, False),
            ):
                if value != needed:
                    raise ValueError(
                        f"{name}={value!r} must be {needed!r} with latent attention"
                    )
            if self.positions == "learned" or any(
                kind.has_attention for kind in self.other_attention
            ):
                raise ValueError(
                    "layers with latent attention must be alike, with rotary positions "
                    "or none"
                )
        if self.residual == "single":
            names = [kind.feed_forward for kind in self.other_attention]
            if ("experts" in names) != (self.experts is not None):
                raise ValueError(
                    f"experts={self.experts} must be set exactly if a kind of layers "
                    "has feed_forward='experts'"
                )
            if self.experts is not None and self.experts.num_dense_layers:
                raise ValueError(
                    f"experts.num_dense_layers={self.experts.num_dense_layers} must be "
                    "0 with residual='single'"
                )
        if self.experts is None:
            return
        if self.experts.beside_mlp and (
            self.residual != "serial"
            or self.norm_places != "both"
            or self.experts.num_dense_layers
        ):
            raise ValueError(
                "experts.beside_mlp=True needs residual='serial', norm_places='both' "
                "and num_dense_layers=0"
            )
        if self.experts.num_dense_layers >= self.num_layers:
            raise ValueError(
                f"experts.num_dense_layers={self.experts.num_dense_layers} must be "
                f"below num_layers={self.num_layers}"
            )
        if self.mlp_bias:
            raise ValueError(f"mlp_bias={self.mlp_bias!r}: experts have no biases")

    def _check_attention(self) -> None:
        """Checks fields of attention against each other."""
        kinds = range(1 + len(self.other_attention))
        if not self.attention_pattern or not {*self.attention_pattern} <= {*kinds}:
            raise ValueError(
                f"attention_pattern={self.attention_pattern} must have kinds in [0, "
                f"{kinds.stop})"
            )
        is_single = self.residual == "single"
        if not is_single and any(kind.feed_forward for kind in self.other_attention):
            raise ValueError(
                f"residual={self.residual!r} must be 'single' with a kind of layers "
                "that has feed_forward"
            )
        if is_single and self.num_ahead_layers:
            raise ValueError(
                f"num_ahead_layers={self.num_ahead_layers} must be 0 with "
                "residual='single'"
            )
        recurrent = any(kind.is_recurrent for kind in self.other_attention)
        if recurrent != (self.recurrence is not None):
            raise ValueError(
                f"recurrence={self.recurrence} must be set exactly if other_attention "
                "has a recurrent kind"
            )
        if recurrent and self.num_ahead_layers:
            raise ValueError(
                f"num_ahead_layers={self.num_ahead_layers} must be 0 with recurrent "
                "layers"
            )
        learned = [
            x.positions == "learned" for x in self.attention_kinds if x.has_attention
        ]
        if any(learned) and not all(learned):
            raise ValueError("positions='learned' must be that of all kinds or of none")
        for kind in self.other_attention:
            if kind.num_kv_heads and self.num_q_heads % kind.num_kv_heads:
                raise ValueError(
                    f"num_q_heads={self.num_q_heads} must be a multiple of "
                    f"num_kv_heads={kind.num_kv_heads}"
                )
        has_shared = any(kind.shares_kv for kind in self.other_attention)
        if has_shared and (self.score_growth is not None or self.sinks):
            raise ValueError("shares_kv takes neither score_growth nor sinks")
        for name in ("layer_input_size", "layer_scale"):
            if (has_shared or getattr(self, name)) and self.num_ahead_layers:
                raise ValueError(f"num_ahead_layers must be 0 with shares_kv or {name}")
        for layer in range(self.num_layers):
            kind = self.attention_kinds[self.kind_of(layer)]
            if not kind.shares_kv:
                continue
            before = [self.attention_kinds[self.kind_of(x)] for x in range(layer)]
            source = dataclasses.replace(kind, shares_kv=False, mlp_size=None)
            if source not in before:
                raise ValueError(f"layer {layer} shares K and V of no earlier layer")
        if self.value_norm and not (self.qk_norm and self.qk_norm_over == "head"):
            raise ValueError(f"value_norm={self.value_norm} needs qk_norm over heads")
        size = self.rotary_size
        if size is not None and size > self.head_dim:
            raise ValueError(
                f"rotary_size={size} must be at most head_dim={self.head_dim}"
            )
        if self.score_growth is not None and self.rope_scaling is None:
            raise ValueError(f"score_growth={self.score_growth} needs rope_scaling")
        if self.residual == "parallel" and self.experts is not None:
            raise ValueError("residual='parallel' must be 'serial' with experts")

    def check_length(self, length: int, name: str) -> None:
        """Checks the length of sequences against the positions of the model.

        Warns if rotary positions are exceeded.

        Args:
          length: tokens of the longest sequence.
          name: name of the length in messages.

        Raises:
          ValueError: positions are learned, and `length` exceeds their number, or
            factors of frequencies hold for shorter sequences only.
        """
        for kind in self.rotary_kinds:
            most = kind.rope_scaling.max_positions if kind.rope_scaling else None
            if most is not None and length > most:
                raise ValueError(
                    f"{name}={length} must be at most {most}, up to which the model's "
                    "short factors of rotary frequencies hold; without short_factor in "
                    "config.json the long factors are used for all lengths"
                )
        if length <= self.max_positions:
            return
        if self.positions == "learned":
            raise ValueError(
                f"{name}={length} must be at most {self.max_positions}, the model's "
                "learned positions"
            )
        warnings.warn(
            f"{name}={length} is past {self.max_positions}, the positions that the "
            "model supports; the quality may be poor there",
            stacklevel=3,
        )

    @property
    def group_size(self) -> int:
        """Number of query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def rotary_dim(self) -> int:
        """Number of features of a query or key head that are rotated in pairs."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def score_scale(self) -> float:
        """Factor on the products of queries and keys."""
        scale = self.attention_scale or self.head_dim**-0.5
        if self.rope_scaling is None:
            return scale
        return scale * self.rope_scaling.score_magnitude**2

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """The kinds of attention, by the numbers of `attention_pattern`."""
        first = AttentionKind(
            window=self.window,
            positions=self.positions,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
        )
        return first, *self.other_attention

    def of_kind(self, kind: AttentionKind) -> "ModelConfig":
        """Returns the model with the sizes of the layers of a kind."""
        names = "head_dim", "num_kv_heads", "keys_are_values", "mlp_size"
        values = {name: getattr(kind, name) for name in names}
        changes = {name: x for name, x in values.items() if x is not None}
        return dataclasses.replace(self, **changes) if changes else self

    @property
    def rotary_kinds(self) -> tuple[AttentionKind, ...]:
        """The kinds of attention with rotary positions."""
        return tuple(
            kind
            for kind in self.attention_kinds
            if kind.positions == "rope" and kind.has_attention
        )

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Numbers of the recurrent layers, in order."""
        kinds = self.attention_kinds
        layers = range(self.num_layers)
        return tuple(x for x in layers if kinds[self.kind_of(x)].is_recurrent)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with K and V of their own, in order."""
        kinds = [self.attention_kinds[self.kind_of(x)] for x in range(self.num_layers)]
        return tuple(
            x for x, y in enumerate(kinds) if y.has_attention and not y.shares_kv
        )

    @property
    def has_special_layers(self) -> bool:
        """True if layers have sizes or inputs of their own, or share K and V (Gemma 4).

        Such models are served on one device. Costs, and training, which reads them,
        refuse them.
        """
        return (
            any(
                kind.shares_kv or self.of_kind(kind) is not self
                for kind in self.other_attention
            )
            or self.keys_are_values
            or self.layer_input_size > 0
            or (self.experts is not None and self.experts.beside_mlp)
        )

    @property
    def kv_groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers with K and V, by the number and the width of their KV heads."""
        groups: dict[tuple[int, int], list[int]] = {}
        for layer in self.attention_layers:
            config = self.of_kind(self.attention_kinds[self.kind_of(layer)])
            shape = config.num_kv_heads, config.head_dim
            groups.setdefault(shape, []).append(layer)
        return tuple(map(tuple, groups.values()))

    def kv_source(self, kind: AttentionKind) -> int:
        """Returns the number of the kind whose K and V the layers of a kind read."""
        if kind.shares_kv:
            kind = dataclasses.replace(kind, shares_kv=False, mlp_size=None)
        return self.attention_kinds.index(kind)

    def kv_layer(self, layer: int) -> int:
        """Returns the layer whose K and V a layer with attention reads."""
        kind = self.attention_kinds[self.kind_of(layer)]
        if not kind.shares_kv:
            return layer
        source = self.kv_source(kind)
        return max(x for x in range(layer) if self.kind_of(x) == source)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer, None without one or without attention."""
        layers = range(self.num_layers)
        return tuple(self.attention_kinds[self.kind_of(x)].window for x in layers)

    def kind_of(self, layer: int) -> int:
        """Returns the number of the kind of attention of a layer."""
        return self.attention_pattern[layer % len(self.attention_pattern)]

    @property
    def ahead_config(self) -> "ModelConfig":
        """Shape of a model whose layers are those for multi-token prediction.

        They are of the kind of the last layer.
        """
        experts = self.experts
        if experts is not None:
            experts = dataclasses.replace(experts, num_dense_layers=0)
        return dataclasses.replace(
            self,
            num_layers=self.num_ahead_layers,
            num_ahead_layers=0,
            experts=experts,
        )

    @property
    def num_mixtures(self) -> int:
        """Number of layers with experts."""
        return sum(map(self.is_mixture, range(self.num_layers)))

    def has_feed_forward(self, layer: int) -> bool:
        """Returns True if a layer has an MLP or experts."""
        kind = self.attention_kinds[self.kind_of(layer)]
        return self.residual != "single" or kind.feed_forward is not None

    def is_mixture(self, layer: int) -> bool:
        """Returns True if a layer has experts in place of an MLP."""
        if self.residual == "single":
            kind = self.attention_kinds[self.kind_of(layer)]
            return kind.feed_forward == "experts"
        return self.experts is not None and layer >= self.experts.num_dense_layers
