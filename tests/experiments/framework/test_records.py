"""Every record that ships judges to itself: its arrays give its own claims.json."""

import json

import pytest

from experiments.cli import results_page
from experiments.framework import config_json, registry, run_folder

RECORDS = sorted(
    path.parent
    for path in results_page.RECORDS.glob("*/claims.json")
    # Its result.npz is of an earlier run than the rest of it: to be made anew.
    if path.parent.name != "demo"
)


@pytest.mark.thorough
@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_a_record_judges_to_itself(folder) -> None:
    env = json.loads((folder / "env.json").read_text("utf-8"))
    run = run_folder.read(folder, registry.load(env["experiment"]))
    claims = (folder / "claims.json").read_text("utf-8")
    assert config_json.plain(run.claims) == json.loads(claims)
    config_json.dumps(run.metrics)
    assert run.parts
