"""The field's own words: none that only this project would understand."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
# Each stands for a word of the field: the KV loop, a bf16x3 split, partitioned, unsharded, diverge, rounds,
# reference, aligned, deduplicate, roles of warps, a lower bound, silently, ...
WORDS = r"""
(short|long|each|of|where)\ walks? | planes | dealt | show_(whole|shards) | the\ ranks\ part | laps
yardsticks? | only_launch | loadable | nobody\ (waits|uses|may|is\ left|to\ talk) | nobody's
with\ nobody | talks\ to\ nobody | to\ whoever\ wrote | life\ sign | foretells? | finds\ dead
lost\ its\ peer | mixes\ up\ the | echoes\ in | what\ came\ of\ it | odd\ addresses | optimizer's\ back
hardly\ a\ tile | up\ to\ so\ many | told\ (of|from)\ th(em|is) | all\ its\ bits | lets?\ the\ others\ wait
takes\ the\ tensors\ as\ they | goes?\ wrong\ in\ silence | by\ and\ large | may\ share\ a\ line
the\ later\ counts | last\ words | that\ of\ the\ fullest | everything\ that\ shows | at\ the\ least\b
"""
PATTERN = re.compile(rf"(?i)\b({'|'.join(WORDS.strip().splitlines())})", re.VERBOSE)
PLACES = ["README.md", *(f"lib/{package}" for package in ("cs336_systems", "labbook")), "notebooks"]


def files():
    for place in PLACES:
        path = REPOSITORY / place
        found = (
            [path]
            if path.is_file()
            else [p for p in path.rglob("*") if p.suffix in (".py", ".ipynb")]
        )
        yield from (
            (str(each.relative_to(REPOSITORY)), each.read_text(encoding="utf-8")) for each in found
        )


def test_no_house_words():
    found = {name: {match[0] for match in PATTERN.finditer(text)} for name, text in files()}
    assert {name: words for name, words in found.items() if words} == {}
