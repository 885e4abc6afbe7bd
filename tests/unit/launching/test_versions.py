"""Installed versions against the tested ones."""

from pathlib import Path

from megatron_trace.launching import versions

CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"


def test_a_build_of_the_tested_release_is_no_difference():
    installed = {"torch": "2.11.0+cu130", "triton": "3.5.1", "apex": "0.1", "numpy": None}
    tested = {"torch": "2.11.0", "triton": "3.6.0", "numpy": "2.5.5"}
    assert versions.differences(installed, tested) == {"triton": ("3.5.1", "3.6.0")}


def test_names_are_compared_as_the_package_index_does(tmp_path):
    path = tmp_path / "constraints.txt"
    path.write_text("# a remark\nTransformer_Engine==2.20.2\nmegatron.core==0.19.2\n")
    found = versions.differences({"transformer-engine": "2.20.1"}, versions.tested_versions(path))
    assert found == {"transformer-engine": ("2.20.1", "2.20.2")}


def test_these_tests_run_with_the_tested_versions():
    installed = versions.installed_versions()
    assert installed["torch"] is not None
    assert versions.differences(installed, versions.tested_versions(CONSTRAINTS)) == {}
