"""Answers prompts with a model on disk, live on the terminal: `jaxkv generate`.

Only the standard library is imported up here: `--help` needs the options alone.
"""

import contextlib
import dataclasses
import os
import signal
import sys
import time
from typing import Any, Literal

from experiments import bundled, interrupting, showing
from experiments.running import Answer

STEPS_PER_CALL = 4
"""Text comes this many tokens at a time; a benchmark would take more."""
PAGE_SIZE = 16
MAX_ANSWERS = 64
"""To one prompt: each has a slot, and a slot has its pages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to answer, and how tokens are drawn."""

    prompt: tuple[str, ...]
    """Text to go on from; may be given several times."""
    max_tokens: int = 128
    """Tokens after which an answer ends."""
    temperature: float = 0.8
    """0 takes the most likely token."""
    top_k: int = 0
    """Most likely tokens kept; 0 keeps all."""
    top_p: float = 0.95
    """Probability that the kept tokens reach, in (0, 1]."""
    min_p: float = 0.0
    """Smallest probability kept, as a share of the largest, in [0, 1]."""
    seed: int = 0
    """Of the draws; the second prompt's is one more, and so on."""
    stop: tuple[str, ...] = ()
    """Text that ends an answer; may be given several times."""
    n: int = 1
    """Answers to each prompt."""
    best_of: int | None = None
    """Answers drawn for each prompt, of which the n most likely ones are kept, the best
    first; n by default."""
    chat: bool = False
    """Whether a prompt is a message to a chat model, in its own format."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights and pages."""


def generate(model: str, options: Options) -> Answer:
    """Answers the prompts, all at once, and streams the texts in their order.

    Ctrl-C ends the answers with what they have.

    Args:
      model: a folder, or the name of a bundled model.
      options: what to answer.

    Returns:
      The completions, with status 130 if they were ended early.

    Raises:
      ValueError: the model, a prompt or an option cannot be used.
    """
    from jaxkv.sampling import Sampling

    if not options.prompt:
        raise ValueError("give at least one --prompt")
    asks = [
        Sampling(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=options.seed + i,
            max_tokens=options.max_tokens,
            stop=options.stop,
            n=options.n,
            best_of=options.best_of,
        )
        for i in range(len(options.prompt))
    ]
    num_drawn, num_kept = asks[0].num_sequences, options.n
    if num_drawn > MAX_ANSWERS:
        raise ValueError(
            f"{num_drawn} answers to a prompt must be at most {MAX_ANSWERS}"
        )
    drawn: list[list[dict[str, Any]]] = [
        [
            {"text": "", "tokens": [], "reason": "cancelled", "prompt": i}
            for _ in range(num_drawn)
        ]
        for i in range(len(asks))
    ]
    status = 0
    engine, prompts = _engine(model, options)
    for i, pair in enumerate(zip(prompts, asks, strict=True)):
        engine.submit(*pair, request_id=i)
    headings = tuple(text for text in options.prompt for _ in range(num_kept))
    write, start_s = _Writer(headings), time.perf_counter()
    with contextlib.ExitStack() as stack:
        try:
            for event in engine.stream():
                if not any(each["tokens"] for answers in drawn for each in answers):
                    # All is compiled; from here on there is something to keep.
                    stack.enter_context(
                        interrupting.handling(signal.default_int_handler, lambda: None)
                    )
                answers, first = drawn[event.request_id], event.request_id * num_kept
                mine = answers[event.sample]
                mine["text"] += event.text
                mine["tokens"] += event.tokens
                mine["reason"] = event.reason or mine["reason"]
                if num_drawn == num_kept:
                    is_over = event.reason is not None
                    write(first + event.sample, event.text, is_over)
                elif event.completion is not None:
                    # Who is among the best is known only now.
                    best = [answers[each.sample] for each in event.completion.answers]
                    drawn[event.request_id] = best
                    for place, each in enumerate(best):
                        write(first + place, each["text"], True)
        except KeyboardInterrupt:
            status = 130
            for i, answers in enumerate(drawn):
                if len(answers) > num_kept:  # none is known to be the best
                    for place, each in enumerate(answers[:num_kept]):
                        write(i * num_kept + place, each["text"], True)
    write.finish()
    completions = [each for answers in drawn for each in answers[:num_kept]]
    num = sum(len(each["tokens"]) for each in completions)
    reasons = ", ".join(dict.fromkeys(each["reason"] for each in completions))
    duration_s = time.perf_counter() - start_s
    said = f"[{reasons}; {num:,} tokens in {duration_s:.1f} s]"
    print(said, file=sys.stderr)
    return Answer({"completions": completions}, [], [], status)


def _engine(model: str, options: Options) -> tuple[Any, list[list[int]]]:
    """Loads the model, encodes the prompts, and makes an engine that holds them."""
    from jaxkv import checkpoints, models, serving, states

    folder = bundled.folder_of(model)
    loaded = checkpoints.load_model(folder, dtype=options.dtype)
    tokenizer, shape = loaded.tokenizer, loaded.config
    if tokenizer is None:
        raise ValueError(f"{folder}: has no tokenizer that reads text")
    if options.chat:
        messages = [[{"role": "user", "content": text}] for text in options.prompt]
        prompts = [tokenizer.encode_chat(message) for message in messages]
    else:
        prompts = [tokenizer.encode(text) for text in options.prompt]
    # Powers of two: few configurations, so that a later start finds its programs.
    longest = max(map(len, prompts)) + options.max_tokens
    max_length = min(_power_of_two(max(longest, 256)), shape.max_positions)
    num_sequences = max(options.n, options.best_of or 0)
    max_slots = min(_power_of_two(len(prompts) * num_sequences), 8)
    max_slots = max(max_slots, _power_of_two(num_sequences))
    bounds = states.EngineConfig(
        num_pages=max_slots * -(-max_length // PAGE_SIZE),
        page_size=PAGE_SIZE,
        max_slots=max_slots,
        max_length=max_length,
        max_stop_tokens=max(4, len(loaded.eos_ids)),
        steps_per_call=STEPS_PER_CALL,
    )
    engine = serving.Engine(
        loaded.params,
        models.Forward(shape, bounds.numerics),
        models.make_pages(shape, bounds, dtype=options.dtype),
        bounds,
        tokenizer=tokenizer,
        eos_ids=loaded.eos_ids,
        vocab_size=shape.vocab_size,
    )
    return engine, prompts


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()


class _Writer:
    """Writes texts that grow side by side one after the other.

    The first that is not complete is live; what later ones have waits for its turn.
    On a terminal the prompt stands before each answer, and nothing that a model says
    can steer the terminal.
    """

    def __init__(self, prompts: tuple[str, ...]):
        self._prompts = prompts
        self._waiting = [""] * len(prompts)
        self._complete = [False] * len(prompts)
        self._turn = 0
        self._on_terminal = sys.stdout.isatty()
        self._begin()

    def __call__(self, index: int, text: str, complete: bool) -> None:
        """Takes new text of an answer, and whether it is complete with it."""
        self._waiting[index] += text
        self._complete[index] |= complete
        while self._turn < len(self._prompts):
            self._say(self._waiting[self._turn])
            self._waiting[self._turn] = ""
            if not self._complete[self._turn]:
                return
            self._say("\n")
            self._turn += 1
            self._begin()

    def finish(self) -> None:
        """Writes what still waits."""
        for index in range(self._turn, len(self._prompts)):
            self(index, "", True)

    def _begin(self) -> None:
        if self._turn == len(self._prompts):
            return
        if len(self._prompts) > 1:
            self._say(f"--- {self._turn + 1} of {len(self._prompts)} ---\n")
        if self._on_terminal:
            prompt = showing.visible(self._prompts[self._turn])
            is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
            sys.stdout.write(prompt if is_plain else f"\033[1m{prompt}\033[0m")

    def _say(self, text: str) -> None:
        sys.stdout.write(showing.visible(text) if self._on_terminal else text)
        sys.stdout.flush()
