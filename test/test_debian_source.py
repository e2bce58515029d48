"""The set on a real source tree with its tests: Debian's source package of 2.6.0."""

import pytest
from conftest import contents, PATHS, snapshot
from patchset import apply
from patchset.files import clone
from upkeep import debian_source
from upkeep.releases import Unavailable


def test_source_tree(tmp_path, capsys):
    """Fetched by way of the machine's own apt mirror, and unpacked once."""
    try:
        source = debian_source.tree()
    except Unavailable as reason:
        pytest.skip(str(reason))
    root = clone(source, tmp_path / "pytorch", PATHS)
    before = snapshot(root)
    assert "2.6.0" in (root / "version.txt").read_text()
    assert (root / "test/functorch/test_ac.py").is_file()

    assert apply.main(["--status", str(root)]) == 0
    assert "every file as in 2.6.0" in capsys.readouterr().out
    assert apply.main([str(root)]) == 0
    said = capsys.readouterr().out
    assert "2.6.0 is too old for cache-key, random-ops, memory-budget, " in said
    assert "dropout gets wrong gradients there" in said
    assert contents(root)["test/functorch/test_ac_knapsack_solvers.py"]
    assert apply.main(["--reverse", str(root)]) == 0
    assert snapshot(root) == before
