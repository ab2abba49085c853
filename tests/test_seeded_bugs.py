"""The list of seeded bugs fits the tree."""

import pathlib

from tests.support import seeded_bugs

PACKAGES = ("pallas_kernels", "jaxkv", "scaling", "experiments")
MIN_BUGS = 60


def test_every_bug_can_be_seeded() -> None:
    bugs = seeded_bugs.load_bugs()
    assert len(bugs) >= MIN_BUGS
    assert len({bug.name for bug in bugs}) == len(bugs)
    for bug in bugs:
        source = (seeded_bugs.ROOT / bug.file).read_text("utf-8")
        assert source.count(bug.original) == 1, bug.name
        assert bug.wrong != bug.original, bug.name
        compile(source.replace(bug.original, bug.wrong), bug.file, "exec")
        assert 1 <= len(bug.tests) <= 3, bug.name
        for file in bug.tests:
            assert (seeded_bugs.ROOT / "tests" / file).is_file(), (bug.name, file)


def test_every_subpackage_has_a_bug() -> None:
    subpackages = {
        init.parent.relative_to(seeded_bugs.ROOT)
        for package in PACKAGES
        for init in (seeded_bugs.ROOT / package).glob("*/__init__.py")
        if any(path.stat().st_size > 100 for path in init.parent.rglob("*.py"))
    }
    folders = {
        parent
        for bug in seeded_bugs.load_bugs()
        for parent in pathlib.Path(bug.file).parents
    }
    assert not subpackages - folders
