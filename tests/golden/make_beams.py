"""Writes `beams.npz`: results of transformers' beam search with golden models.

The settings are three beam widths, three length penalties and the three rules of early
stopping. Two stop tokens are chosen so that only some answers reach the length limit
and no two answers have nearly equal scores. To be run by hand when a case is added;
needs torch and transformers:

    python tests/golden/make_beams.py
"""

import itertools
import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
MODELS = ("llama", "gpt2", "mistral")
WIDTHS = (2, 4, 6)
LENGTH_PENALTIES = (-0.5, 1.0, 2.0)
EARLY_STOPPING = (False, True, "never")
LIMIT = 16
# Rounding must not change the order of answers, and their lengths must differ.
MIN_MARGIN = 1e-4
MIN_LENGTHS = 8


def search(
    model: transformers.PreTrainedModel,
    prompt: np.ndarray,
    stops: tuple[int, ...],
    width: int,
    length_penalty: float,
    early_stopping: bool | str,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the answers [width, LIMIT], padded with -1, and their scores."""
    generation = model.generate(
        torch.tensor(prompt[None].astype(np.int64)),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=width,
        num_return_sequences=width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_new_tokens=LIMIT,
        do_sample=False,
        eos_token_id=list(stops) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    tokens = np.full((width, LIMIT), -1, np.int32)
    answers = generation.sequences[:, len(prompt) :].numpy()
    # The padding token may also be sampled; beam indices mark the ends of answers.
    is_token = generation.beam_indices.numpy() >= 0
    tokens[:, : answers.shape[1]] = np.where(is_token, answers, -1)
    return tokens, generation.sequences_scores.numpy()


def search_all_settings(
    model: transformers.PreTrainedModel, seed: int
) -> dict[str, np.ndarray] | None:
    """Returns a prompt and the results of all settings; None if the case is weak."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, model.config.vocab_size, 7).astype(np.int32)
    # Tokens that are frequent in beams end many answers.
    free, _ = search(model, prompt, (), max(WIDTHS), 1.0, False)
    common = np.bincount(free[:, 1:].reshape(-1)).argsort()[::-1][:8]
    stops = tuple(int(token) for token in rng.choice(common, 2, replace=False))
    width = max(WIDTHS)
    tokens = []
    scores = []
    for setting in itertools.product(WIDTHS, LENGTH_PENALTIES, EARLY_STOPPING):
        answers, values = search(model, prompt, stops, *setting)
        if np.diff(values).max() > -MIN_MARGIN:
            return None
        missing = width - len(values)
        tokens.append(np.pad(answers, ((0, missing), (0, 0)), constant_values=-1))
        scores.append(np.pad(values, (0, missing), constant_values=-np.inf))
    lengths = (np.stack(tokens) >= 0).sum(axis=2)
    if len(set(lengths.reshape(-1).tolist())) < MIN_LENGTHS:
        return None
    return {
        "prompt": prompt,
        "stops": np.array(stops, np.int32),
        "tokens": np.stack(tokens).astype(np.int16),
        "scores": np.stack(scores).astype(np.float32),
    }


def main() -> None:
    """Writes the file; the seed of a model is the first with a strong case."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    settings = list(itertools.product(WIDTHS, LENGTH_PENALTIES, range(3)))
    arrays = {"settings": np.array(settings, np.float32)}
    for name in MODELS:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            HERE / name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        search_arrays = None
        seed = -1
        while search_arrays is None:
            seed += 1
            search_arrays = search_all_settings(model, seed)
        arrays |= {f"{name}_{key}": value for key, value in search_arrays.items()}
        lengths, num = np.unique(
            (search_arrays["tokens"] >= 0).sum(axis=2), return_counts=True
        )
        print(f"{name} seed {seed}, lengths {lengths}, counts {num}")
    np.savez_compressed(HERE / "beams.npz", allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
