"""Answers prompts with a model on disk, live on the terminal: `jaxkv generate`.

The module imports only the standard library at the top, so that `--help` is fast.
"""

import contextlib
import dataclasses
import math
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from jaxkv import files
from jaxkv.cli import parsing
from jaxkv.cli.arguments import parse_model_options
from jaxkv.cli.console import STATUS, AnswerWriter, handle_signals, raise_stopped
from jaxkv.cli.output import CommandOutput
from jaxkv.files import find_heads_folder, model_folder

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxkv.sampling import Grammar, Sampling
    from jaxkv.serving import Engine

STEPS_PER_CALL = 4
"""Tokens per update of the text; a benchmark would use more."""
PAGE_SIZE = 16
MAX_ANSWERS = 64
"""Largest number of answers to one prompt; each has a slot with its own pages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Loading and speculation of the model, in every command that serves one."""

    speculate: Annotated[
        Literal[
            "ngram",
            "jacobi",
            "lookahead",
            "early-exit",
            "draft-model",
            "medusa",
            "eagle",
            "mtp",
        ]
        | None,
        parsing.describe_default("one token per step"),
    ] = None
    """Speculative decoding: drafts tokens and verifies several in one step. Drafts come
    from n-grams of the text so far, from Jacobi iterations or lookahead, from the
    model's first layers, from --draft-model, from --heads, or from the model's own
    modules for multi-token prediction. The answers are the same, and usually
    faster."""
    drafts: Annotated[
        int | None, parsing.describe_default("3, or 7 with --adaptive")
    ] = None
    """Largest number of draft tokens per step, at least 1; `max_drafts` in Python."""
    adaptive: bool = False
    """Adapt the draft length to the measured acceptance rate and costs."""
    draft_model: Annotated[str | None, parsing.describe_default("none")] = None
    """Smaller model with the same vocabulary: a folder or the name of a bundled
    model."""
    heads: Annotated[str | None, parsing.describe_default("a bundled model's own")] = (
        None
    )
    """Folder of draft heads trained for the model, for medusa and eagle;
    `SpeculationConfig.heads_folder` in Python."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and pages."""
    weights: Literal["model", "int8", "fp8", "mxfp4", "nvfp4"] = "model"
    """Format of the weights of the layers' products: --dtype, or 8 or 4 bits with
    scales, as the folder has them or quantized while they are read."""
    end_tokens: Literal["union", "generation_config"] = "union"
    """Tokens that end an answer: union takes those of generation_config.json (or
    config.json) and the tokenizer's; generation_config takes the tokenizer's only if
    those files name none, as transformers does."""
    lora: tuple[str, ...] = ()
    """LoRA adapter that requests may choose: a folder in the form of peft, or
    NAME=FOLDER; may be given several times."""
    evict: Annotated[
        Literal["streaming-llm", "h2o", "snapkv", "keydiff", "quest"] | None,
        parsing.describe_default("keeps all tokens"),
    ] = None
    """Rule by which each KV head evicts tokens from the cache; quest evicts none, and
    selects the pages that the answer reads."""
    evict_budget: int = 0
    """Tokens that each head keeps, or with quest reads, with --evict."""
    parallel: str = ""
    """Parallel layout in the syntax of `jaxkv cost`: tp=4 divides heads, MLP and
    vocabulary over four devices. A CPU provides as many virtual devices as needed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Prompts and sampling parameters."""

    prompt: tuple[str, ...]
    """Text to continue; may be given several times."""
    max_tokens: int = 128
    """Largest number of tokens of an answer."""
    temperature: float = 0.8
    """Sampling temperature; 0 takes the most likely token."""
    top_k: int = 0
    """Number of most likely tokens kept; 0 keeps all."""
    top_p: float = 0.95
    """Probability mass of the kept tokens, in (0, 1]."""
    min_p: float = 0.0
    """Smallest probability kept, relative to the largest, in [0, 1]."""
    seed: int = 0
    """Seed of the first prompt; each further prompt has the next integer."""
    stop: tuple[str, ...] = ()
    """Text that ends an answer; may be given several times."""
    n: int = 1
    """Answers per prompt."""
    best_of: Annotated[int | None, parsing.describe_default("n")] = None
    """Answers drawn per prompt; the n most likely ones are kept, best first."""
    beam_width: Annotated[int | None, parsing.describe_default("no search")] = None
    """Number of beams of a beam search, instead of sampling; the n best answers are
    printed with their scores after the search."""
    length_penalty: float = 1.0
    """Exponent of the length in the score of a beam, log-probability / tokens^penalty;
    larger values favour long answers."""
    early_stopping: Literal["false", "true", "never"] = "false"
    """End of a beam search: true stops at beam_width answers; false continues while
    better answers are likely, never while they are possible."""
    json_schema: Annotated[Path | None, parsing.describe_default("none")] = None
    """File with a JSON schema that answers match; needs the extra `grammar`."""
    regex: Annotated[str | None, parsing.describe_default("none")] = None
    """Regular expression that whole answers match; needs the extra `grammar`."""
    held_out: Annotated[Path | None, parsing.describe_default("none")] = None
    """Text file for the log-likelihood that --weights lose."""
    chat: bool = False
    """Treat the prompt as a message to a chat model, with its chat template."""
    adapter: Annotated[str | None, parsing.describe_default("that of --lora")] = None
    """Name of the adapter that answers, needed with several ones."""
    trace: Annotated[Path | None, parsing.describe_default("none is kept")] = None
    """File for the page tables of every step; `jaxkv view` replays it."""
    loading: Annotated[ModelOptions, parsing.UNNAMED] = ModelOptions()


def main(args: list[str]) -> CommandOutput:
    """Runs `generate MODEL [OPTIONS]`."""
    return generate(*parse_model_options(args, GenerateOptions, "jaxkv generate MODEL"))


def generate(model: str, options: GenerateOptions) -> CommandOutput:
    """Answers all prompts concurrently, and streams the texts in their order.

    After Ctrl-C, answers end with the text so far.

    Args:
      model: folder, or name of a bundled model.
      options: prompts and sampling parameters.

    Returns:
      The completions; status 130 if they were ended early, 143 after SIGTERM.

    Raises:
      ValueError: the model, a prompt or an option cannot be used.
    """
    asks = _asks(options)
    num_drawn = asks[0].num_sequences
    num_kept = options.n
    is_search = options.beam_width is not None
    # Answers stream as they grow, unless they are ranked at the end.
    is_ranked = is_search or num_drawn > num_kept
    begun: Any = {"text": "", "tokens": [], "reason": "cancelled"}
    draw_fields = [begun | {"sample": x, "score": None} for x in range(num_drawn)]
    prompt_answers: list[list[dict[str, Any]]] = [
        [x | {"tokens": [], "prompt": i} for x in draw_fields] for i in range(len(asks))
    ]
    status = 0
    under_way = {*range(len(asks))}
    keeps = None
    cost = _measure_weights(model, options)
    engine, prompts, grammar = _engine(model, options)
    asks = [dataclasses.replace(ask, grammar=grammar) for ask in asks]
    for i, pair in enumerate(zip(prompts, asks, strict=True)):
        engine.submit(*pair, request_id=i)
    headings = tuple(text for text in options.prompt for _ in range(num_kept))
    write = AnswerWriter(headings, is_whole=is_ranked)
    start_s = time.perf_counter()
    tuned_s = engine.compile_s  # before the answers
    if is_search:
        print("[beam search: text appears at the end]", file=sys.stderr)

    def write_all(request: int) -> None:
        for place, answer in enumerate(prompt_answers[request][:num_kept]):
            write(request * num_kept + place, answer["text"], True, answer["score"])

    with contextlib.ExitStack() as stack:
        try:
            for event in engine.stream():
                if not keeps:  # compiled: from here on there are partial answers
                    keeps = handle_signals(raise_stopped, lambda number: None)
                    stack.enter_context(keeps)
                i = event.request_id
                sample = event.sample
                if not is_search:  # beams are not final answers
                    answer = prompt_answers[i][sample]
                    answer["text"] += event.text
                    answer["tokens"] += event.tokens
                    answer["reason"] = event.reason or answer["reason"]
                if not is_ranked:
                    is_over = event.reason is not None
                    write(i * num_kept + sample, event.text, is_over)
                if event.completion is not None:
                    prompt_answers[i] = [
                        {name: getattr(candidate, name) for name in _TOLD}
                        | {"prompt": i}
                        for candidate in event.completion.answers
                    ]
                    under_way.discard(i)
                    if is_ranked:
                        write_all(i)
        except KeyboardInterrupt as error:
            status = getattr(error, "status", STATUS)
            if is_ranked:  # unfinished requests have no ranking
                for i in sorted(under_way):
                    write_all(i)
    write.finish()
    if options.trace is not None:
        from jaxkv.report import RunTrace

        RunTrace.of_engine(engine).save(options.trace)
    completions = [
        candidate for answers in prompt_answers for candidate in answers[:num_kept]
    ]
    compile_s = engine.compile_s
    duration_s = time.perf_counter() - start_s - (compile_s - tuned_s)
    print(_summary(completions, duration_s, compile_s), file=sys.stderr)
    document = {"completions": completions, "compile_s": compile_s} | cost
    return CommandOutput(document, [], [], status)


def _measure_weights(model: str, options: GenerateOptions) -> dict[str, Any]:
    """Prints and returns the cost of the weights' format on `--held-out`.

    Raises:
      ValueError: the file cannot be read, or the weights are those of the model.
    """
    path = options.held_out
    loading = options.loading
    if path is None:
        return {}
    if loading.weights == "model":
        raise ValueError(f"--held-out {path}: needs --weights of 8 or 4 bits")
    import numpy as np

    from jaxkv import scoring
    from jaxkv.files import read_text
    from jaxkv.models import load_tokenizer

    folder = model_folder(model)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"{folder}: has no tokenizer that reads text")
    cost = scoring.weights_cost(
        folder,
        np.asarray(tokenizer.encode(read_text(path)), np.int32),
        weights=loading.weights,
        dtype=loading.dtype,
    )
    print(
        f"[weights {loading.weights}: {cost.quantized_bytes / 1e6:.4g} MB, "
        f"{cost.model_bytes / 1e6:.4g} MB in {loading.dtype}; lose {cost.loss:.2g} of "
        f"{cost.nats_per_token:.4g} nats per token (standard error {cost.error:.1g}, "
        f"{cost.num_tokens:,} tokens)]",
        file=sys.stderr,
    )
    return {"weights": {"format": loading.weights, **cost._asdict()}}


_TOLD = ("text", "tokens", "reason", "sample", "score")
"""Fields of an answer in the document, in addition to the index of its prompt."""


def _asks(options: GenerateOptions) -> "list[Sampling]":
    """Returns the sampling parameters of each prompt.

    Raises:
      ValueError: an option is out of range, or contradicts another option.
    """
    from jaxkv.sampling import Sampling

    if not options.prompt:
        raise ValueError("--prompt must be given at least once")
    is_search = options.beam_width is not None
    for name, off_value in _ONLY_DRAWS if is_search else _ONLY_SEARCHES:
        value = getattr(options, name)
        flag = "--" + name.replace("_", "-")
        if value not in (off_value, getattr(GenerateOptions, name)):
            why = "not used by beam search" if is_search else "needs --beam-width"
            raise ValueError(f"{flag} {value}: {why}")
    check_drafting(options.loading)
    flags = [x for x in ("json_schema", "regex") if getattr(options, x) is not None]
    if flags and is_search:
        raise ValueError(f"--{flags[0].replace('_', '-')}: not used by beam search")
    if len(flags) > 1:
        raise ValueError("--regex: is not supported with --json-schema")
    names = [*adapter_folders(options.loading)]
    adapter = options.adapter
    if adapter is None and names:
        if len(names) > 1:
            raise ValueError(f"--adapter must be {' or '.join(names)}")
        [adapter] = names
    # Sampling options have the names of the fields of `Sampling`.
    option_values = vars(options)
    field_names = {x.name for x in dataclasses.fields(Sampling)}
    how: dict[str, Any] = {
        name: option_values[name] for name in option_values if name in field_names
    }
    how["adapter"] = adapter
    how["early_stopping"] = _EARLY_STOPPING[options.early_stopping]
    ask = Sampling(**how)
    seeds = range(len(options.prompt))
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
"""Sampling options, and the values that disable them."""
_ONLY_SEARCHES = (("length_penalty", 1), ("early_stopping", "false"))
_ONLY_DRAFTS = (
    ("drafts", ()),
    ("adaptive", ()),
    ("draft_model", ("draft-model",)),
    ("heads", ("medusa", "eagle")),
)
"""Options of speculation, and the methods that support them; () means all methods."""


def _summary(
    completions: list[dict[str, Any]], duration_s: float, compile_s: float = 0.0
) -> str:
    """Returns finish reasons, tokens, time without compilation, and a score."""
    num = sum(len(completion["tokens"]) for completion in completions)
    reasons = ", ".join(
        dict.fromkeys(completion["reason"] for completion in completions)
    )
    text = f"{reasons}; {num:,} tokens in {duration_s:.1f} s"
    if len(completions) == 1 and completions[0]["score"] is not None:
        text += f"; score {completions[0]['score']:.3f}"
    text += f"; compiled in {compile_s:.1f} s" if compile_s else ""
    return f"[{text}]"


def check_drafting(options: ModelOptions) -> None:
    """Validates the options of speculation.

    Raises:
      ValueError: an option needs a method of speculation, or there is no draft token.
    """
    if options.drafts is not None and options.drafts < 1:
        raise ValueError(f"--drafts {options.drafts}: must be at least 1")
    method = options.speculate
    for name, methods in _ONLY_DRAFTS:
        value = getattr(options, name)
        if value in (None, False) or method in methods or (method and not methods):
            continue
        flag = "--" + name.replace("_", "-") + ("" if value is True else f" {value}")
        needed = ", or ".join(methods) or "METHOD"
        raise ValueError(f"{flag}: needs --speculate {needed}")


def _read_grammar(options: GenerateOptions, tokenizer: Any) -> "Grammar | None":
    """Makes the grammar of --json-schema or --regex; None without them.

    Raises:
      ValueError: the extra is not installed, the file cannot be read, or the schema or
        expression is not supported.
    """
    from jaxkv.sampling import Grammar

    if options.regex is not None:
        return Grammar.from_regex(options.regex, tokenizer)
    if options.json_schema is None:
        return None
    schema = files.read_json(options.json_schema)
    return Grammar.from_json_schema(schema, tokenizer)


def _engine(
    model: str, options: GenerateOptions
) -> "tuple[Engine, list[list[int]], Grammar | None]":
    """Loads the model, encodes the prompts, and makes an engine that holds them."""
    read = read_model(model, options.loading)
    loaded = read.loaded
    page_size = read.page_size
    tokenizer = loaded.tokenizer
    grammar = _read_grammar(options, tokenizer)
    grammar_bounds = {}
    if grammar is not None:
        num_cells = _power_of_two(grammar.table.size)
        grammar_bounds = {"max_grammars": 1, "max_grammar_cells": num_cells}
    if options.chat:
        from jaxkv.text import convert_openai_messages

        messages = [[{"role": "user", "content": text}] for text in options.prompt]
        chats = [
            convert_openai_messages(conversation, tokenizer)
            for conversation in messages
        ]
        prompts = [tokenizer.encode_chat(chat) for chat in chats]
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
        record_pages=options.trace is not None,
        **grammar_bounds,
    )
    return engine, prompts, grammar


class ReadModel(NamedTuple):
    """A model that was read from its folder."""

    name: str
    """Path of the folder, or name of a bundled model."""
    folder: Path
    mesh: "Mesh | None"
    """Device mesh; None for one device."""
    page_size: int
    loaded: Any
    """`checkpoints.LoadedModel` with a tokenizer."""


def read_model(model: str, options: ModelOptions) -> ReadModel:
    """Reads a model with the type and layout of `--dtype` and `--parallel`.

    Raises:
      ValueError: the model cannot be used, or has no tokenizer; `--parallel` is not
        supported by an engine; or there are too few devices.
    """
    from jaxkv.parallel import check_all_used, make_mesh, set_cpu_devices
    from jaxkv.serving import read_model_folder

    folder = model_folder(model)
    mesh = None
    degrees = mesh_degrees(options.parallel)
    if (num := math.prod(degrees.values())) == 1:
        check_all_used(1)
    else:
        set_cpu_devices(num)
        mesh = make_mesh(**degrees)
    # The part of a page on each device has the size of a whole page on one device.
    page_size = PAGE_SIZE if mesh is None else PAGE_SIZE * mesh.shape.get("context", 1)
    loaded = read_model_folder(
        folder,
        dtype=options.dtype,
        weights=options.weights,
        mesh=mesh,
        end_tokens=options.end_tokens,
    )
    if loaded.tokenizer is None:
        raise ValueError(f"{folder}: has no tokenizer that reads text")
    return ReadModel(model, folder, mesh, page_size, loaded)


def load_engine(read: ReadModel, options: ModelOptions, **bounds: Any) -> "Engine":
    """Makes an engine of a model, with the requested speculation.

    Args:
      read: model.
      options: options of speculation.
      **bounds: fields of `EngineConfig`, except `page_size`.
    """
    from jaxkv.serving import Engine

    return Engine.load(
        read.folder,
        loaded=read.loaded,
        mesh=read.mesh,
        page_size=read.page_size,
        adapters=adapter_folders(options),
        **speculation_fields(read.name, options),
        **bounds,
    )


def adapter_folders(options: ModelOptions) -> dict[str, Path]:
    """Returns the folders of `--lora` by the names of the adapters.

    Raises:
      ValueError: two adapters have one name, or a name or a folder is empty.
    """
    folders: dict[str, Path] = {}
    for text in options.lora:
        name, equals, folder = text.partition("=")
        if not equals:
            folder = text
            name = Path(text).name
        if not name or not folder or name in folders:
            raise ValueError(
                f"--lora {text}: must be NAME=FOLDER with a name of its own"
            )
        folders[name] = Path(folder)
    return folders


def speculation_fields(model: str, options: ModelOptions) -> dict[str, Any]:
    """Returns arguments of `Engine.load`: types, end tokens, eviction, speculation."""
    from jaxkv.speculation import HEAD_KINDS, SpeculationConfig

    names = "dtype", "weights", "end_tokens"
    fields: dict[str, Any] = {name: getattr(options, name) for name in names}
    for name in ("evict", "evict_budget"):
        if value := getattr(options, name):
            fields[name] = value
    if options.drafts is not None:
        fields["max_drafts"] = options.drafts
    if options.speculate is None:
        return fields
    draft = heads = None
    if options.draft_model is not None:
        draft = model_folder(options.draft_model)
    if options.heads is not None or options.speculate in HEAD_KINDS:
        heads = options.heads or find_heads_folder(model, options.speculate)
    return fields | {
        "speculate": SpeculationConfig(
            options.speculate,
            draft_folder=draft,
            heads_folder=heads,
            adaptive=options.adaptive,
        )
    }


def mesh_degrees(parallel: str) -> dict[str, int]:
    """Returns the arguments of `make_mesh` for `--parallel`.

    Raises:
      ValueError: the layout is not supported by an engine.
    """
    degrees: dict[str, int] = {}
    words = [word.strip() for word in parallel.split(",") if word.strip()]
    pattern = re.compile(r"(tp|tensor|cp|pages|ep|expert)=([1-9][0-9]*)")
    for word in words:
        match = pattern.fullmatch(word)
        if match is None and word == "gather":
            continue
        if match is None or _AXES[match[1]] in degrees:
            raise ValueError(f"--parallel {parallel}: {_PARALLEL_HELP}")
        degrees[_AXES[match[1]]] = int(match[2])
    has_experts = degrees.get("expert", 1) > 1
    if has_experts != ("gather" in words):
        raise ValueError(f"--parallel {parallel}: {_PARALLEL_HELP}")
    return {axis: degrees.get(axis, 1) for axis in ("tensor", "context", "expert")}


_AXES = {
    "tp": "tensor",
    "tensor": "tensor",
    "cp": "context",
    "pages": "context",
    "ep": "expert",
    "expert": "expert",
}
"""Axis of the mesh for each word of `--parallel`."""
_PARALLEL_HELP = "an engine supports tp=N, cp=N and ep=N,gather, each once"


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()
