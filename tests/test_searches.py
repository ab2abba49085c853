"""Searches for 40 terms of the field: each finds the file that implements the term.

The file must be among the five in which the term occurs most often.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SEARCHES = {
    "page table": "jaxkv/memory/page_table.py",
    "reference count": "jaxkv/memory/page_pool.py",
    "copy-on-write": "jaxkv/memory/page_table.py",
    "prefix cache": "jaxkv/memory/prefixes/prefix_cache.py",
    "eviction": "jaxkv/memory/prefixes/prefix_eviction.py",
    "swap": "jaxkv/engine/paging/swapping.py",
    "KV cache": "jaxkv/memory/kv_pages.py",
    "block size": "jaxkv/engine/state.py",
    "continuous batching": "jaxkv/scheduling/first_come.py",
    "static batching": "jaxkv/scheduling/static_batching.py",
    "chunked prefill": "jaxkv/scheduling/prefill_chunks.py",
    "scheduling policy": "jaxkv/scheduling/interface.py",
    "token budget": "jaxkv/scheduling/interface.py",
    "preemption": "jaxkv/ledger/transitions.py",
    "admission": "jaxkv/ledger/transitions.py",
    "first come first served": "jaxkv/scheduling/first_come.py",
    "beam search": "jaxkv/sampling/beam_search.py",
    "top-p": "jaxkv/sampling/truncation.py",
    "repetition penalty": "jaxkv/sampling/sampler.py",
    "stop string": "jaxkv/text/stop_strings.py",
    "chat template": "jaxkv/text/chat_templates.py",
    "detokenizer": "jaxkv/text/streams.py",
    "snapshot": "jaxkv/engine/snapshots.py",
    "rotary": "jaxkv/models/rotary.py",
    "mixture of experts": "jaxkv/models/moe.py",
    "draft length": "jaxkv/speculation/adaptive.py",
    "acceptance rate": "jaxkv/simulation/acceptance.py",
    "rejection sampling": "jaxkv/speculation/verifiers.py",
    "prompt lookup": "jaxkv/speculation/ngram.py",
    "tree attention": "jaxkv/engine/drafting.py",
    "tensor parallel": "jaxkv/parallel/tensor.py",
    "ring attention": "jaxkv/parallel/sequence.py",
    "time to first token": "jaxkv/workloads/metrics.py",
    "Poisson": "jaxkv/workloads/arrivals.py",
    "online softmax": "pallas_kernels/online_softmax.py",
    "isoFLOP": "scaling/frontiers/isoflop.py",
    "bootstrap": "scaling/fits/fitting.py",
    "compute-optimal": "scaling/frontiers/frontier.py",
    "learning rate schedule": "scaling/training/recipes.py",
    "model FLOPs utilization": "scaling/costs/flops.py",
}


def _texts() -> dict[str, str]:
    """Returns the library modules by path, in lower case with single spaces."""
    texts = {}
    for package in ("jaxkv", "pallas_kernels", "scaling"):
        for path in (ROOT / package).rglob("*.py"):
            text = re.sub(r"\n\s*#", " ", path.read_text(encoding="utf-8"))
            texts[path.relative_to(ROOT).as_posix()] = " ".join(text.lower().split())
    return texts


TEXTS = _texts()


@pytest.mark.parametrize(("term", "file"), SEARCHES.items())
def test_search_finds_the_implementing_file(term: str, file: str) -> None:
    counts = {name: text.count(term.lower()) for name, text in TEXTS.items()}
    assert counts[file] > 0, f"{term!r} does not occur in {file}"
    more = [name for name, num in counts.items() if num > counts[file]]
    assert len(more) < 5, f"{term!r} occurs more often in {sorted(more)}"
