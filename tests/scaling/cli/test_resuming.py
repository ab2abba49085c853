"""`jaxkv train` resumed: damaged checkpoints, and other devices."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxkv.report import config_dumps
from scaling.sweeps import TRAININGS
from tests.support import texts
from tests.support.commands import Command, assert_refused, document

STOPPED = "train mine.json --out run --max-seconds 1e-9"


def write_config(name: str, **changes: Any) -> None:
    """Writes the smoke config, for a small text."""
    config = json.loads(config_dumps(TRAININGS["smoke"]))
    corpus = config["corpus"] | {"pattern": "text/*.py", "held_out": 0.2}
    Path(name).write_text(json.dumps(config | {"corpus": corpus} | changes))


def test_a_damaged_checkpoint_is_one_line(jaxkv: Command) -> None:
    texts.write_functions(Path("text"))
    write_config("mine.json")
    assert jaxkv(*STOPPED.split())[0] == 75
    folder = Path("run/checkpoints/0").absolute()
    path = max(folder.rglob("d/*"), key=lambda x: x.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    remedy = f"--resume previous (or deleting {folder}) goes on from the newest whole"
    assert_refused(jaxkv, STOPPED, f"{path}: is damaged; {remedy}")
    assert_refused(jaxkv, f"{STOPPED} --resume previous", "no checkpoint is whole")
    (folder / "SHA256SUMS").unlink()
    assert_refused(jaxkv, STOPPED, f"{folder / 'SHA256SUMS'}: is missing")
    assert_refused(jaxkv, f"{STOPPED} --resume next", "--resume")


@pytest.mark.slow
def test_a_run_resumed_on_other_devices_has_equal_losses(jaxkv: Command) -> None:
    """The help text and the warning name the same tolerance."""
    texts.write_functions(Path("text"))
    write_config("mine.json")
    # The first half of the run, as its folder has it when it is stopped there.
    write_config("half.json", num_steps=20, cooldown_steps=0)
    full_run = document(jaxkv, "train", "mine.json", "--out", "whole")
    document(jaxkv, "train", "half.json", "--out", "run")
    whole_config = Path("whole/config.json").read_text()
    Path("run/config.json").write_text(whole_config)
    output = "up to 20 were divided as num_processes=1, later ones as data=4,.* 0.002, "
    divided = ("--parallel", "dp=4", "--zero", "1")
    with pytest.warns(UserWarning, match=output):
        resumed_run = document(jaxkv, "train", "mine.json", "--out", "run", *divided)
    for name in ("train_loss", "loss"):
        assert resumed_run[name] == pytest.approx(full_run[name], rel=1e-4)
    page = " ".join(jaxkv("train", "--help-all")[1].replace("│", " ").split())
    assert "later losses agree to a relative 2e-3" in page
