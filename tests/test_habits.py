"""The house's own habits: hooks check what `make check` checks, markers are declared, issues ask for the doctor."""

import re
import tomllib
from pathlib import Path

import yaml


def test_hooks_check_what_make_check_does(repository: Path) -> None:
    makefile = (repository / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^check: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    wanted = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    repos = yaml.safe_load((repository / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [repo["repo"] for repo in repos] == ["local"], "nothing is fetched"
    hooks = repos[0]["hooks"]
    assert [" ".join([hook["entry"], *hook.get("args", [])]) for hook in hooks] == wanted
    assert all(hook["language"] == "system" and hook["pass_filenames"] is False for hook in hooks)


def test_every_marker_is_declared(repository: Path) -> None:
    options = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"][
        "ini_options"
    ]
    declared = {marker.partition(":")[0] for marker in options["markers"]}
    assert declared >= {"slow", "server", "gpu"} and "--strict-markers" in options["addopts"]
    fast = re.search(r'-m "([^"]+)"', (repository / "Makefile").read_text(encoding="utf-8"))
    assert fast is not None
    assert set(re.findall(r"not (\w+)", fast[1])) == declared, "make test-fast leaves out everything that is marked"


def test_issues_ask_for_the_doctors_findings(repository: Path) -> None:
    forms = sorted((repository / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    forms = [form for form in forms if form.name != "config.yml"]
    assert forms
    for form in forms:
        asked = yaml.safe_load(form.read_text(encoding="utf-8"))
        assert asked["name"] and asked["description"]
        fields = [field for field in asked["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields)
        (doctor,) = (field for field in fields if "vllm-medusa doctor" in field["attributes"]["label"])
        assert doctor["validations"]["required"] is True and doctor["attributes"]["render"] == "text"
