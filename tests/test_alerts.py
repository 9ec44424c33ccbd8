"""The shipped alerts: each fires when it should and at no other time, by families that exist.

When they fire is in `alerts_test.yml`, which promtool runs; here it is seen that nothing of them is left out of it.
"""

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from processes import ROOT

from vllm_locust.families import BOUNDS_S, FAMILIES, PREFIX

ALERTS = ROOT / "docker" / "alerts.yml"
STORIES = ROOT / "tests" / "alerts_test.yml"
RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
}
OF_KIND = {"histogram": ("_bucket", "_count", "_sum"), "summary": ("", "_count", "_sum")}


def promtool(*arguments: str) -> str:
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed here (Debian's package is prometheus)")
    done = subprocess.run(["promtool", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_takes_the_configuration_and_the_rules_that_it_names() -> None:
    said = promtool("check", "config", "docker/prometheus.yml")
    assert f"{len(RULES)} rules found" in said
    assert "FAILED" not in said


def test_each_alert_fires_when_it_should_and_is_silent_in_healthy_runs() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(STORIES))


def test_no_alert_is_without_a_story_in_which_it_fires_and_one_in_which_it_has_ended() -> None:
    stories = yaml.safe_load(STORIES.read_text())["tests"]
    told = [check for story in stories for check in story.get("alert_rule_test", ())]
    fires = {check["alertname"] for check in told if check["exp_alerts"]}
    assert fires == RULES.keys()
    assert stories[0]["name"] == "healthy runs"
    (healthy,) = stories[0]["promql_expr_test"]
    assert "ALERTS" in healthy["expr"]
    assert healthy["exp_samples"] == []


@pytest.mark.parametrize("name", RULES)
def test_an_alert_refers_to_families_labels_and_edges_that_exist(name: str) -> None:
    rule = RULES[name]
    series = {
        family.name + suffix: family for family in FAMILIES.values() for suffix in OF_KIND.get(family.kind, ("",))
    }
    used = re.findall(rf"({PREFIX}\w+)(?:\{{([^}}]*)\}})?", rule["expr"])
    assert used
    for found, matchers in used:
        labels = {*series[found].labels, *(["le"] if found.endswith("_bucket") else [])}
        assert set(re.findall(r"(\w+)\s*(?:=|!=)", matchers)) <= labels
    for edge in re.findall(r'le="([^"]*)"', rule["expr"]):
        assert edge in map(str, BOUNDS_S)
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"].keys() == {"summary", "description"}


def test_the_stories_are_told_of_series_that_exist() -> None:
    told = re.findall(rf"{PREFIX}\w+", STORIES.read_text())
    names = {family.name for family in FAMILIES.values()}
    assert {re.sub("_(bucket|count)$", "", name) for name in told} <= names
