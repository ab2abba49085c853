"""Keys of a Hugging Face `config.json` that change no logit, grouped by reason.

A key that is neither here nor read elsewhere is refused, since it may ask for
unsupported arithmetic. Nulls and empty values are ignored.
"""

from collections.abc import Mapping

from jaxkv.models.huggingface.family import Family
from jaxkv.models.huggingface.values import shorten

HARMLESS_KEYS: Mapping[str, tuple[str, ...]] = {
    "origin of the file": (
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "_from_model_config",
        "transformers_version",
        "transformers.js_config",
        "tokenizer_class",
        "unsloth_fixed",
        "unsloth_version",
        "is_llama_config",
    ),
    "the caller sets the dtype of the weights": (
        "dtype",
        "torch_dtype",
        "use_bfloat16",
    ),
    "choice between implementations of the same arithmetic": (
        "attn_implementation",
        "_attn_implementation",
        "experts_implementation",
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        "torchscript",
        "chunk_size_feed_forward",
        "pretraining_tp",
        "use_cache",
    ),
    "further outputs of a call": (
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "return_dict_in_generate",
        "output_scores",
        "use_return_dict",
        "tie_last_hidden_states",
    ),
    "training: initial weights, dropout, terms of the loss": (
        "initializer_range",
        "initializer_factor",
        "init_std",
        "attention_dropout",
        "activation_dropout",
        "hidden_dropout",
        "dropout",
        "attention_probs_dropout_prob",
        "hidden_dropout_prob",
        "classifier_dropout",
        "attn_pdrop",
        "embd_pdrop",
        "resid_pdrop",
        "layerdrop",
        "gradient_checkpointing",
        "neftune_noise_alpha",
        "router_jitter_noise",
        "router_aux_loss_coef",
    ),
    "special tokens; `checkpoints` reads those that end a text": (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "prefix",
    ),
    "sampling parameters, which each request sets": (
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "max_length",
        "min_length",
        "max_new_tokens",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "early_stopping",
        "length_penalty",
        "num_return_sequences",
        "repetition_penalty",
        "encoder_repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "exponential_decay_length_penalty",
        "remove_invalid_values",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "task_specific_params",
    ),
    "classifiers, and models with an encoder": (
        "id2label",
        "label2id",
        "num_labels",
        "_num_labels",
        "problem_type",
        "finetuning_task",
        "is_decoder",
        "tie_encoder_decoder",
        "tf_legacy_loss",
    ),
}
"""Reason -> keys, for every family."""

ONLY: Mapping[str, object] = {
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "rope_interleaved": False,
    "use_mrope": False,
}
"""Keys of every family that change no logit with this value only."""

_REFUSAL_REASONS = {
    "quantization_config": "only f32, bf16 and f16 weights, fp8 (e4m3) in blocks of "
    "128 x 128, the MXFP4 of gpt-oss, and fp8, int8 and NVFP4 of modelopt and "
    "compressed-tensors without a scheme for K and V",
    "compression_config": "only f32, bf16 and f16 weights",
    "auto_map": "code that comes with a model is never run",
}
"""Reasons of refusal of some common keys."""

_EVERYWHERE = {"architectures", "model_type", *ONLY}
_EVERYWHERE.update(key for keys in HARMLESS_KEYS.values() for key in keys)


def refuse_unknown(
    family: Family, settings: Mapping[str, object], read: frozenset[str]
) -> None:
    """Raises an error for keys that may change the model's arithmetic.

    Args:
      family: entry of the family.
      settings: the file, without nulls.
      read: keys that are read, in addition to those of the family's tables.

    Raises:
      ValueError: there are such keys; the message has the first few.
    """
    valid_keys = _EVERYWHERE | read | {*family.keys, *family.only, *family.only_served}
    valid_keys.update(family.equal, family.harmless)
    unknown = [
        key
        for key, value in settings.items()
        if key not in valid_keys and value not in ("", [], {})
    ]
    for key in unknown:
        if key in _REFUSAL_REASONS:
            raise ValueError(f"{key} is not supported: {_REFUSAL_REASONS[key]}")
    if unknown:
        few = ", ".join(
            f"{shorten(key)[1:-1]}={shorten(settings[key])}" for key in unknown[:3]
        )
        more = ", ..." if len(unknown) > 3 else ""
        raise ValueError(
            f"{few}{more} may change the logits of {family.architecture} "
            "and is not supported; remove keys that do not"
        )
