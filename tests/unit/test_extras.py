"""The table of extras in README lists the extras of pyproject.toml, with the packages of each."""

import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[2]


def test_the_table_of_extras_agrees_with_pyproject():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    declared = {name: [re.match(r"[\w-]+", package)[0] for package in packages] for name, packages in extras.items()}
    section = (ROOT / "README.md").read_text().partition("\n## Extras\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| (.+?) \| .+ \|$", section, flags=re.MULTILINE)
    listed = {name: packages.split(", ") for name, packages in rows}
    assert len(listed) == len(rows), "an extra is in the table twice"
    assert listed == declared, "add a row to the table under Extras in README.md, or correct it"
