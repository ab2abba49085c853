"""The experiments there are, found without importing them.

To add one, give it a line here; its module is as `study` says, or, in the older way,
has `CONFIGS`, `run(config, progress)`, `plot(axes, result)` and what `Study` names.
"""

import importlib
from typing import TYPE_CHECKING, NamedTuple

from experiments.framework import config_json

if TYPE_CHECKING:
    from experiments.framework.study import Experiment


class Entry(NamedTuple):
    """What is known of an experiment before it is imported.

    Attributes:
      name: as the command line has it.
      question: in a line.
      configs: the names of its configs, the default first.
      module: where its studies are.
    """

    name: str
    question: str
    configs: tuple[str, ...]
    module: str


_ENTRIES = (
    Entry(
        "batching",
        "What is gained when requests come and go while others run?",
        ("smoke", "paper", "real"),
        "experiments.serving.batching.experiment",
    ),
    Entry(
        "bench_decode",
        "How many tokens a second does the engine serve, and how many do others?",
        ("real", "smoke"),
        "experiments.bench.decode.experiment",
    ),
    Entry(
        "bench_fit",
        "How fast is a bootstrap of the Chinchilla law, and does each resample end "
        "lower?",
        ("real", "quick", "smoke"),
        "experiments.bench.fit.experiment",
    ),
    Entry(
        "bench_kernels",
        "How fast are the kernels, and how near to what the device can do at all?",
        ("real", "quick", "grid", "smoke"),
        "experiments.bench.kernels.experiment",
    ),
    Entry(
        "bench_simulate",
        "How many steps of a scheduler does one simulate in a second, alone and "
        "mapped?",
        ("real", "smoke"),
        "experiments.bench.simulate.experiment",
    ),
    Entry(
        "bench_train",
        "How many tokens a second do we train on, and how many does PyTorch?",
        ("real", "gpu", "smoke"),
        "experiments.bench.train.experiment",
    ),
    Entry(
        "bundled_model",
        "How well does a small byte-level model learn Python's standard library?",
        ("smoke", "shipped"),
        "experiments.training.bundled_model.experiment",
    ),
    Entry(
        "chatbot",
        "How much load does paged memory let a chat service serve that reads its "
        "history?",
        ("smoke", "paper"),
        "experiments.serving.chatbot.experiment",
    ),
    Entry(
        "chunked_prefill",
        "What do users feel of how prompts are read, and what does reading in "
        "chunks buy?",
        ("smoke", "paper"),
        "experiments.serving.chunked_prefill.experiment",
    ),
    Entry(
        "cost_check",
        "Do the cost formulas count what JAX and XLA count?",
        ("real", "smoke"),
        "experiments.counting.cost_check.experiment",
    ),
    Entry(
        "demo",
        "How much faster does continuous batching serve the same requests?",
        ("real", "smoke"),
        "experiments.serving.demo.experiment",
    ),
    Entry(
        "disaggregation",
        "What does it buy to read prompts on other GPUs than those that decode?",
        ("smoke", "paper"),
        "experiments.serving.disaggregation.experiment",
    ),
    Entry(
        "experts",
        "What does a mixture of experts gain over a dense model of equal active "
        "compute?",
        ("smoke", "cpu", "gpu"),
        "experiments.training.experts.experiment",
    ),
    Entry(
        "fit_coverage",
        "Do 90 % intervals of a fit hold the truth, and is what cannot be fitted "
        "doubted?",
        ("real", "smoke"),
        "experiments.training.fit_coverage.experiment",
    ),
    Entry(
        "flash_attention",
        "What does attention in tiles save, and whom does it serve?",
        ("smoke", "real"),
        "experiments.serving.flash_attention.experiment",
    ),
    Entry(
        "isoflop",
        "What do small models say of the best size for a budget, and of a larger "
        "one's loss?",
        ("smoke", "cpu", "gpu"),
        "experiments.training.isoflop.experiment",
    ),
    Entry(
        "known_entropy",
        "Do models approach a language's entropy as the law says, and never pass it?",
        ("cpu", "smoke", "gpu"),
        "experiments.training.known_entropy.experiment",
    ),
    Entry(
        "kv_cache",
        "What does a token cost with and without keys and values that are kept?",
        ("smoke", "real"),
        "experiments.serving.kv_cache.experiment",
    ),
    Entry(
        "latency_vs_rate",
        "How much load does paged memory let a GPU serve before latencies grow?",
        ("smoke", "paper", "figure_12a", "azure"),
        "experiments.serving.latency_vs_rate.experiment",
    ),
    Entry(
        "learning_rate",
        "How does the best learning rate change with the width of a model?",
        ("smoke", "cpu", "gpu"),
        "experiments.training.learning_rate.experiment",
    ),
    Entry(
        "lecture_numbers",
        "Do the lectures' own numbers on serving follow from memory and bandwidth?",
        ("paper", "smoke"),
        "experiments.counting.lecture_numbers.experiment",
    ),
    Entry(
        "mean_estimation",
        "Does the error of a mean fall as one over the number of samples?",
        ("smoke", "paper"),
        "experiments.training.mean_estimation.experiment",
    ),
    Entry(
        "memory_waste",
        "What is the memory of a serving card good for, and how much of it is wasted?",
        ("paper", "smoke"),
        "experiments.serving.memory_waste.experiment",
    ),
    Entry(
        "page_size",
        "What does it cost that keys and values lie in pages, and how large should "
        "pages be?",
        ("smoke", "real", "paper"),
        "experiments.serving.page_size.experiment",
    ),
    Entry(
        "page_tables",
        "Where do the words of a sequence lie in paged memory?",
        ("smoke",),
        "experiments.serving.page_tables.experiment",
    ),
    Entry(
        "preemption",
        "What does it cost when requests are preempted, and what makes it cheap?",
        ("real", "smoke", "paper"),
        "experiments.serving.preemption.experiment",
    ),
    Entry(
        "prefix_caching",
        "How much of what prompts have in common does a prefix cache find, at "
        "which size?",
        ("real", "smoke"),
        "experiments.serving.prefix_caching.experiment",
    ),
    Entry(
        "rivals",
        "Does the transformer win over its rivals, and at what compute to equal loss?",
        ("smoke", "cpu", "gpu"),
        "experiments.training.rivals.experiment",
    ),
    Entry(
        "sharing",
        "How much K and V memory do sequences with a common beginning share?",
        ("real", "smoke", "paper"),
        "experiments.serving.sharing.experiment",
    ),
)


def entries() -> tuple[Entry, ...]:
    """The experiments there are, sorted by name."""
    return _ENTRIES


def find(name: str) -> Entry:
    """Returns the entry of an experiment.

    Args:
      name: its name; hyphens may stand for underscores.

    Raises:
      ValueError: there is no such experiment; the line gives the nearest names.
    """
    known = {entry.name: entry for entry in entries()}
    entry = known.get(name.replace("-", "_"))
    if entry is None:
        raise ValueError(config_json.unknown("experiment", name, known))
    return entry


def load(name: str) -> "Experiment":
    """Imports an experiment.

    Args:
      name: its name, as `find` takes it.

    Raises:
      ValueError: there is no such experiment; the line gives the nearest names.
    """
    from experiments.framework import study

    entry = find(name)
    studies = study.of_module(importlib.import_module(entry.module))
    return study.Experiment(entry.name, entry.question, studies)
