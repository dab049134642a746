"""Rows of earlier kernels are told from those of today's."""

from cs336_systems.attention import revision
from cs336_systems.attention.revision import is_earlier


def test_a_change_of_the_kernels_comes_with_a_date():
    assert revision.digest() == revision.DIGEST, (
        "the kernels or their tiles have changed: set SINCE to now (UTC) and DIGEST to the digest on the left"
    )


def test_the_digest_follows_the_code_alone(tmp_path, monkeypatch):
    source = tmp_path / "kernel.py"
    monkeypatch.setattr(revision, "SOURCES", (source.name,))
    monkeypatch.setattr(revision, "__file__", str(tmp_path / "revision.py"))
    texts = [
        '"""One."""\ndef f(x):\n    """Two."""\n    return x\n',
        "def f(x):  # other words\n    return x\n",
        "def f(x):\n    return -x\n",
    ]
    digests = [source.write_text(text) and revision.digest() for text in texts]
    assert digests[0] == digests[1] != digests[2]


def test_only_ours_have_earlier_kernels():
    before, after = "2020-01-01T00:00:00Z", "2999-01-01T00:00:00Z"
    assert is_earlier("flash_triton", "bfloat16", before)
    assert not is_earlier("flash_triton", "bfloat16", after)
    assert not is_earlier("sdpa_cudnn", "bfloat16", before)


def test_each_dtype_has_a_date_of_its_own(monkeypatch):
    monkeypatch.setitem(revision.SINCE, "float32", "2999-01-01T00:00:00Z")
    then = "2998-01-01T00:00:00Z"
    assert [is_earlier("flash_triton", dtype, then) for dtype in ("bfloat16", "float32")] == [False, True]
