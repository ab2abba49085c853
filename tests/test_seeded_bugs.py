"""The list of seeded bugs follows the code."""

from tests.support import folders, seeded_bugs


def test_each_original_text_occurs_once():
    bugs = seeded_bugs.load()
    assert bugs
    for bug in bugs:
        text = (folders.ROOT / bug.file).read_text("utf-8")
        assert text.count(bug.right) == 1, f"{bug.name} has changed: update the bug"
        assert bug.wrong not in (bug.right, ""), bug.name
        for name in bug.tests:
            assert (folders.ROOT / name).is_file(), f"{bug.name}: no file {name}"
