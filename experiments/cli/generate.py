"""Answers prompts with a model on disk, live on the terminal: `jaxkv generate`.

Only the standard library is imported up here: `--help` needs the options alone.
"""

import contextlib
import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from experiments.cli import parsing
from experiments.cli.console import answer_writer, interrupts
from experiments.cli.run import CommandOutput
from experiments.harness import bundled

STEPS_PER_CALL = 4
"""Text comes this many tokens at a time; a benchmark would take more."""
PAGE_SIZE = 16
MAX_ANSWERS = 64
"""To one prompt: each has a slot, and a slot has its pages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How the model is loaded and drafted for, in every command that serves one."""

    speculate: Annotated[
        Literal[
            "ngram",
            "jacobi",
            "lookahead",
            "early-exit",
            "draft-model",
            "medusa",
            "eagle",
        ]
        | None,
        parsing.describe_default("one token a step"),
    ] = None
    """Guesses tokens and has the model check several in a step: from the text so far,
    from its own last guesses or what it wrote looking ahead, by its first layers, by
    --draft-model, or by --heads. The answers are the same, mostly sooner."""
    drafts: Annotated[
        int | None, parsing.describe_default("3, or where it adapts 7")
    ] = None
    """Tokens guessed in a step at most, at least 1."""
    adaptive: bool = False
    """Whether no more is guessed than pays, which is measured first."""
    draft_model: Annotated[str | None, parsing.describe_default("none")] = None
    """A smaller model of the same vocabulary, a folder or the name of a bundled one."""
    heads: Annotated[str | None, parsing.describe_default("a bundled model's own")] = (
        None
    )
    """A folder of heads that were trained for the model, for medusa and eagle."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights and pages."""
    parallel: str = ""
    """How the model is divided, as `jaxkv cost` has it: tp=4 divides heads, MLP and
    vocabulary over four devices. A CPU counts as many as are asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
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
    best_of: Annotated[int | None, parsing.describe_default("n")] = None
    """Answers drawn for each prompt, of which the n most likely ones are kept, the best
    first."""
    beam_width: Annotated[int | None, parsing.describe_default("no search")] = None
    """Searches with so many beams for the most likely answers, instead of drawing; the
    n best are shown, each with its score, once the search has ended."""
    length_penalty: float = 1.0
    """Of beams: an answer scores its log-probability / its tokens to this power, so a
    larger one favours long answers."""
    early_stopping: Literal["false", "true", "never"] = "false"
    """Whether beams end as soon as there are beam_width answers; false goes on while
    better ones are likely, never while they are possible."""
    chat: bool = False
    """Whether a prompt is a message to a chat model, in its own format."""
    loading: Annotated[ModelOptions, parsing.GROUP] = ModelOptions()


def generate(model: str, options: GenerateOptions) -> CommandOutput:
    """Answers the prompts, all at once, and streams the texts in their order.

    Ctrl-C ends the answers with what they have.

    Args:
      model: a folder, or the name of a bundled model.
      options: what to answer.

    Returns:
      The completions, with status 130 if they were ended early, 143 if by SIGTERM.

    Raises:
      ValueError: the model, a prompt or an option cannot be used.
    """
    asks = _asks(options)
    num_drawn, num_kept = asks[0].num_sequences, options.n
    is_search = options.beam_width is not None
    # Answers stream as they grow, unless it is known only later which are kept.
    is_ranked = is_search or num_drawn > num_kept
    begun: Any = {"text": "", "tokens": [], "reason": "cancelled"}
    drawn = [begun | {"sample": x, "score": None} for x in range(num_drawn)]
    found: list[list[dict[str, Any]]] = [
        [x | {"tokens": [], "prompt": i} for x in drawn] for i in range(len(asks))
    ]
    status, under_way, keeps = 0, {*range(len(asks))}, None
    engine, prompts = _engine(model, options)
    for i, pair in enumerate(zip(prompts, asks, strict=True)):
        engine.submit(*pair, request_id=i)
    headings = tuple(text for text in options.prompt for _ in range(num_kept))
    write, start_s = (
        answer_writer.AnswerWriter(headings, whole=is_ranked),
        time.perf_counter(),
    )
    tuned_s = engine.compile_s  # before the answers
    if is_search:
        print("[searching: no text before the end]", file=sys.stderr)

    def write_all(request: int) -> None:
        for place, each in enumerate(found[request][:num_kept]):
            write(request * num_kept + place, each["text"], True, each["score"])

    with contextlib.ExitStack() as stack:
        try:
            for event in engine.stream():
                if not keeps:  # all is compiled; from here on there is something
                    keeps = interrupts.handle_signals(
                        interrupts.raise_stopped, lambda number: None
                    )
                    stack.enter_context(keeps)
                i, sample = event.request_id, event.sample
                if not is_search:  # beams are no answers yet
                    answer = found[i][sample]
                    answer["text"] += event.text
                    answer["tokens"] += event.tokens
                    answer["reason"] = event.reason or answer["reason"]
                if not is_ranked:
                    is_over = event.reason is not None
                    write(i * num_kept + sample, event.text, is_over)
                if event.completion is not None:
                    found[i] = [
                        {name: getattr(each, name) for name in _TOLD} | {"prompt": i}
                        for each in event.completion.answers
                    ]
                    under_way.discard(i)
                    if is_ranked:
                        write_all(i)
        except KeyboardInterrupt as error:
            status = getattr(error, "status", interrupts.STATUS)
            if is_ranked:  # of those under way none is known to be the best
                for i in sorted(under_way):
                    write_all(i)
    write.finish()
    completions = [each for answers in found for each in answers[:num_kept]]
    compile_s = engine.compile_s
    duration_s = time.perf_counter() - start_s - (compile_s - tuned_s)
    print(_summary(completions, duration_s, compile_s), file=sys.stderr)
    document = {"completions": completions, "compile_s": compile_s}
    return CommandOutput(document, [], [], status)


_TOLD = ("text", "tokens", "reason", "sample", "score")
"""Fields of an answer that the document has, beside the number of its prompt."""


def _asks(options: GenerateOptions) -> list[Any]:
    """What is asked for each prompt.

    Raises:
      ValueError: an option is out of its range, or means nothing beside another.
    """
    from jaxkv.sampling import Sampling

    if not options.prompt:
        raise ValueError("give at least one --prompt")
    is_search = options.beam_width is not None
    for name, off_value in _ONLY_DRAWS if is_search else _ONLY_SEARCHES:
        value, flag = getattr(options, name), "--" + name.replace("_", "-")
        if value not in (off_value, getattr(GenerateOptions, name)):
            why = "beam search draws nothing" if is_search else "needs --beam-width"
            raise ValueError(f"{flag} {value}: {why}")
    check_drafting(options.loading)
    # Options of draws have the names that `Sampling` has for them.
    given, known = vars(options), {x.name for x in dataclasses.fields(Sampling)}
    how: dict[str, Any] = {name: given[name] for name in given if name in known}
    how["early_stopping"] = _EARLY_STOPPING[options.early_stopping]
    ask, seeds = Sampling(**how), range(len(options.prompt))
    asks = [dataclasses.replace(ask, seed=options.seed + i) for i in seeds]
    num_sequences = asks[0].num_sequences
    if num_sequences > MAX_ANSWERS:
        kind = "beams for" if is_search else "answers to"
        raise ValueError(
            f"{num_sequences} {kind} a prompt must be at most {MAX_ANSWERS}"
        )
    return asks


_EARLY_STOPPING = {"false": False, "true": True, "never": "never"}
_ONLY_DRAWS = (("temperature", 0), ("top_k", 0), ("top_p", 1), ("min_p", 0))
"""Options of draws, and the values by which they are off."""
_ONLY_SEARCHES = (("length_penalty", 1), ("early_stopping", "false"))
_ONLY_DRAFTS = (
    ("drafts", ()),
    ("adaptive", ()),
    ("draft_model", ("draft-model",)),
    ("heads", ("medusa", "eagle")),
)
"""Options of speculation, and the methods that they go with; () means any."""


def _summary(
    completions: list[dict[str, Any]], duration_s: float, compile_s: float = 0.0
) -> str:
    """Formats why the answers ended, the time without compilation, and a score."""
    num = sum(len(each["tokens"]) for each in completions)
    reasons = ", ".join(dict.fromkeys(each["reason"] for each in completions))
    text = f"{reasons}; {num:,} tokens in {duration_s:.1f} s"
    if len(completions) == 1 and completions[0]["score"] is not None:
        text += f"; score {completions[0]['score']:.3f}"
    text += f"; compiled in {compile_s:.1f} s" if compile_s else ""
    return f"[{text}]"


def check_drafting(options: ModelOptions) -> None:
    """Refuses what says how to guess where nothing is guessed, and no draft at all.

    Raises:
      ValueError: an option means nothing beside another.
    """
    if options.drafts is not None and options.drafts < 1:
        raise ValueError(f"--drafts {options.drafts}: must be at least 1")
    method = options.speculate
    for name, methods in _ONLY_DRAFTS:
        value = getattr(options, name)
        if value in (None, False) or method in methods or (method and not methods):
            continue
        given = "--" + name.replace("_", "-") + ("" if value is True else f" {value}")
        needed = ", or ".join(methods) or "METHOD"
        raise ValueError(f"{given}: needs --speculate {needed}")


def _engine(model: str, options: GenerateOptions) -> tuple[Any, list[list[int]]]:
    """Loads the model, encodes the prompts, and makes an engine that holds them."""
    read = read_model(model, options.loading)
    loaded, page_size = read.loaded, read.page_size
    tokenizer = loaded.tokenizer
    if options.chat:
        messages = [[{"role": "user", "content": text}] for text in options.prompt]
        prompts = [tokenizer.encode_chat(message) for message in messages]
    else:
        prompts = [tokenizer.encode(text) for text in options.prompt]
    # Powers of two: few configurations, so that a later start finds its programs.
    longest = max(map(len, prompts)) + options.max_tokens
    max_length = min(_power_of_two(max(longest, 256)), loaded.config.max_positions)
    num_beams = options.beam_width or 0
    num_sequences = max(options.n, options.best_of or 0, num_beams)
    max_slots = min(_power_of_two(len(prompts) * num_sequences), 8)
    max_slots = max(max_slots, _power_of_two(num_sequences))
    engine = load_engine(
        read,
        options.loading,
        num_pages=max_slots * -(-max_length // page_size),
        max_slots=max_slots,
        max_length=max_length,
        max_beams=_power_of_two(num_beams) if num_beams else 0,
        steps_per_call=STEPS_PER_CALL,
    )
    return engine, prompts


class ReadModel(NamedTuple):
    """A model that was read from its folder."""

    name: str
    """Path of the folder, or name of a bundled model."""
    folder: Path
    mesh: Any
    """Devices that it is divided over; None for one."""
    page_size: int
    loaded: Any
    """`checkpoints.Loaded`; has a tokenizer."""


def read_model(model: str, options: ModelOptions) -> ReadModel:
    """Reads a model as `--dtype` and `--parallel` ask.

    Raises:
      ValueError: it cannot be used, or has no tokenizer; or `--parallel` is no layout
        of an engine, or there are fewer devices, or processes without one.
    """
    from jaxkv.parallel import count_cpu_as, make_mesh, processes
    from jaxkv.serving import loading

    folder, mesh = bundled.find_model_folder(model), None
    degrees = mesh_degrees(options.parallel)
    if (num := math.prod(degrees.values())) == 1:
        processes.check_all_used(1)
    else:
        count_cpu_as(num)
        mesh = make_mesh(**degrees)
    # As long a part of every page as a whole one on one device.
    page_size = PAGE_SIZE if mesh is None else PAGE_SIZE * mesh.shape.get("context", 1)
    loaded = loading.read(folder, dtype=options.dtype, mesh=mesh)
    if loaded.tokenizer is None:
        raise ValueError(f"{folder}: has no tokenizer that reads text")
    return ReadModel(model, folder, mesh, page_size, loaded)


def load_engine(read: ReadModel, options: ModelOptions, **bounds: Any) -> Any:
    """Makes an engine of a model, with the speculation that the options ask for.

    Args:
      read: the model.
      options: how it is drafted for.
      **bounds: fields of `EngineConfig`, `page_size` apart.
    """
    from jaxkv.serving.engine import Engine

    bounds = {"max_stop_tokens": max(4, len(read.loaded.eos_ids))} | bounds
    return Engine.load(
        read.folder,
        loaded=read.loaded,
        mesh=read.mesh,
        page_size=read.page_size,
        **speculation_fields(read.name, options),
        **bounds,
    )


def speculation_fields(model: str, options: ModelOptions) -> dict[str, Any]:
    """Returns arguments of `Engine.load`: dtype, and the speculation asked for."""
    from jaxkv.speculation import SpeculationConfig, head_folders

    fields: dict[str, Any] = {"dtype": options.dtype}
    if options.drafts is not None:
        fields["max_drafts"] = options.drafts
    if options.speculate is None:
        return fields
    draft = heads = None
    if options.draft_model is not None:
        draft = bundled.find_model_folder(options.draft_model)
    if options.heads is not None or options.speculate in head_folders.KINDS:
        heads = options.heads or bundled.find_heads_folder(model, options.speculate)
    return fields | {
        "speculate": SpeculationConfig(
            options.speculate,
            draft_folder=draft,
            heads_folder=heads,
            adaptive=options.adaptive,
        )
    }


def mesh_degrees(parallel: str) -> dict[str, int]:
    """Returns the arguments of `make_mesh` that `--parallel` asks for.

    Raises:
      ValueError: it is no layout of an engine.
    """
    from scaling.costs import parallelism

    layout = parallelism.parse(parallel)
    served: dict[str, Any] = {"tensor": layout.tensor, "pages": layout.pages}
    if layout.gather:
        served |= {"expert": layout.expert, "data": layout.expert, "gather": True}
    if layout != parallelism.Layout(**served):
        raise ValueError(
            f"--parallel {parallel}: an engine is divided by tp, cp and ep=N,gather"
        )
    return {"tensor": layout.tensor, "context": layout.pages, "expert": layout.expert}


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()
