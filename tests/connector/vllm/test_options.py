from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="runs in the vLLM venv: make test-vllm")

from pathlib import Path

import zmq
import zmq.auth

from connector.vllm import versions
from connector.vllm.options import Options, completed, own_options

pytestmark = pytest.mark.vllm


def test_events_describe_themselves_and_our_spec_takes_the_place_of_vllms() -> None:
    assert completed({"cpu_bytes_to_use": 1000, "eviction_policy": "arc"}) == {
        "cpu_bytes_to_use": 1000,
        "eviction_policy": "arc",
        "self_describing_kv_events": True,
        "spec_name": "TieredCPUOffloadingSpec",
        "spec_module_path": "connector.vllm.specs",
    }


def test_storage_tiers_announce_what_they_store_and_keep_their_keys() -> None:
    tier = {"type": "fs", "root_dir": "/mnt/kv", "n_read_threads": 4}
    config = completed({"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]})

    assert config["spec_name"] == "TieredStorageOffloadingSpec"
    assert config["secondary_tiers"] == [
        {**tier, "type": "ToldFileSystemTier", "module_path": "connector.vllm.storage", "enable_kv_events": True}
    ]
    assert tier["type"] == "fs"


def test_what_the_operator_set_is_kept() -> None:
    config = completed(
        {
            "self_describing_kv_events": False,
            "spec_name": "Mine",
            "spec_module_path": "my.specs",
            "secondary_tiers": [{"type": "obj", "enable_kv_events": False}, {"type": "p2p"}],
        }
    )

    assert config["self_describing_kv_events"] is False
    assert (config["spec_name"], config["spec_module_path"]) == ("Mine", "my.specs")
    assert config["secondary_tiers"][0]["enable_kv_events"] is False
    assert config["secondary_tiers"][1] == {"type": "p2p"}


def test_completing_twice_changes_nothing() -> None:
    once = completed({"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs", "root_dir": "/mnt/kv"}]})
    assert completed(once) == once


def test_what_vllm_will_refuse_is_left_to_vllm() -> None:
    assert completed({"secondary_tiers": "fs"})["secondary_tiers"] == "fs"
    assert completed({"secondary_tiers": [5]})["secondary_tiers"] == [5]


def test_options_have_defaults() -> None:
    assert own_options({"cpu_bytes_to_use": 1}) == Options()
    assert own_options({"tierpick": {"heartbeat_s": 5, "load": False}}) == Options(heartbeat_s=5.0, load=False)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"heartbeats": 1}, "unknown option 'heartbeats'; did you mean 'heartbeat_s'?"),
        ({"xyzzy": 1}, "known: heartbeat_s, load, removal_scan_per_s, storage_chunks, curve_secret_key_file"),
        ({"heartbeat_s": -1}, "`float` >= 0"),
        ({"load": "yes"}, "Expected `bool`, got `str`"),
        ({"storage_chunks": 0}, "`int` >= 1"),
        ("all", "an object is needed"),
    ],
)
def test_a_bad_option_is_named_with_what_it_should_be(given: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=r"kv_connector_extra_config\.tierpick: ") as error:
        own_options({"tierpick": given})
    assert complaint in str(error.value)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1rc2.dev3+gabc"])
def test_supported_versions_pass_silently(version: str, caplog: pytest.LogCaptureFixture) -> None:
    versions.check(version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.31.1", "0.9.2"])
def test_an_older_vllm_is_refused_in_one_sentence(version: str) -> None:
    with pytest.raises(ImportError, match=rf"supports vLLM 0\.32 and 0\.33, not {version}"):
        versions.check(version)


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0", "dev"])
def test_a_vllm_that_was_never_tried_is_used_with_a_warning(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(versions.logger, "warning", lambda text, *values: said.append(text % values))
    versions.check(version)
    assert f"not with {version}" in said[0]


def test_keys_come_from_files_that_the_options_name(tmp_path: Path) -> None:
    zmq.auth.create_certificates(tmp_path, "engine")
    options = own_options({"tierpick": {"curve_secret_key_file": str(tmp_path / "engine.key_secret")}})
    curve = options.curve()
    assert curve is not None
    assert zmq.curve_public(curve.secret_key) == curve.public_key
    assert Options().curve() is None


def test_a_bad_key_file_is_an_error_that_names_it() -> None:
    options = own_options({"tierpick": {"curve_secret_key_file": "/nowhere/engine.key_secret"}})
    with pytest.raises(ValueError, match=r"/nowhere/engine\.key_secret: not a CURVE key file"):
        options.curve()
