"""Policies by name, from Python files and from files of weights."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxkv import scheduling
from jaxkv.scheduling import find_policy, linear_score

FILE = """
from typing import NamedTuple
import jax, jaxkv

class Mine(NamedTuple):
    limit: jax.Array = 3
    holds_finished = False
    def plan(self, counts):
        return jaxkv.fcfs().plan(counts)

class Short(NamedTuple):
    holds_finished = False
    def plan(self, counts):
        plan = jaxkv.fcfs().plan(counts)
        return plan._replace(num_rows=plan.num_rows[:2])

class Branches(NamedTuple):
    holds_finished = False
    def plan(self, counts):
        return None if counts.free_pages > 2 else jaxkv.fcfs().plan(counts)

class Sized(NamedTuple):
    limit: int
    holds_finished = False
    def plan(self, counts):
        return jaxkv.fcfs().plan(counts)

def make():
    return jaxkv.fcfs(chunk_size=5)

made = make()
number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_a_file_defines_a_class_a_function_or_a_policy(file: Path) -> None:
    assert find_policy(f"{file}:Mine").limit == 3  # ty: ignore[missing-attribute]
    for name in ("make", "made"):
        assert find_policy(f"{file}:{name}").chunk_size == 5  # ty: ignore[missing-attribute]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("{}:Absent", "{}: defines no Absent; it defines Mine, Short, Branches, Sized"),
        ("{}:number", "{}:number is no policy: it has no method plan"),
        ("{}:Sized", "{}:Sized makes no policy without arguments: "),
        ("{}:Short", "{}:Short: Short.plan returns num_rows=int32[2], which must be"),
        ("{}:Branches", "{}:Branches: TracerBoolConversionError: Attempted boolean"),
        ("{}", "policy={} must name a policy of the file, FILE:NAME"),
        ("{}x.py:Mine", "{}x.py: no such file"),
        ("quickest", "policy=quickest must be one of fcfs, vllm, vllm-0.19, prefill"),
    ],
)
def test_what_is_no_policy_is_refused_in_one_line(
    file: Path, name: str, line: str
) -> None:
    with pytest.raises(ValueError, match=r"^.*$") as refused:
        find_policy(name.format(file))
    assert str(refused.value).startswith(line.format(file))
    assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_executed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "half.py"
    path.write_text("import no_such_module_anywhere")
    with pytest.raises(ValueError, match=r"half.py: cannot be executed: Module"):
        find_policy(f"{path}:Mine")


def test_names_are_the_policies_of_the_library() -> None:
    for name in scheduling.POLICY_NAMES:
        scheduling.check_plan(find_policy(name), name)
    vllm: Any = find_policy("vllm-0.19", max_running=7)
    assert (int(vllm.max_running), bool(vllm.reserves_prompt)) == (7, True)


def test_weights_survive_a_file(tmp_path: Path) -> None:
    policy = linear_score(
        admission={"new_tokens": 0.5, "younger": -1.25},
        victim={"remaining": 2},
        age_per_s=0.05,
        chunk_size=128,
        watermark=2,
    )
    text = scheduling.format_linear_score(policy)
    path = tmp_path / "found.json"
    path.write_text(text)
    jax.tree.map(np.testing.assert_array_equal, find_policy(str(path)), policy)
    assert json.loads(text)["formula"] == (
        "admit the lowest 0.5 new_tokens - 1.25 younger - 0.05 waited_s; preempt the "
        "highest 2 remaining; chunks of at most 128 tokens; 2 pages kept free"
    )


@pytest.mark.parametrize(
    ("document", "line"),
    [
        ({"policy": "tree"}, "policy='tree' must be 'linear_score'"),
        ({"policy": "linear_score", "weight": 1}, "'weight' must be one of admission"),
        (
            {"policy": "linear_score", "admission": {"new_tokens": "much"}},
            "admission.new_tokens='much' must be a number",
        ),
        ({"policy": "linear_score", "admission": 3}, "admission=3 must be a"),
    ],
)
def test_a_wrong_file_of_weights_is_refused(
    tmp_path: Path, document: dict[str, Any], line: str
) -> None:
    path = tmp_path / "found.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"found.json: ") as refused:
        find_policy(str(path))
    assert line in str(refused.value)
