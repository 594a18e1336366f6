"""Which upstream a public model name leads to."""

from pathlib import Path

import pytest

from gateway.upstreams.router import router_from
from protocol.errors import ApiError
from settings import Settings
from settings.errors import SettingsError
from settings.loader import load_settings
from settings.schema import EngineSettings, RouteSettings, TargetSettings, UpstreamSettings


def settings(tmp_path: Path, *models: RouteSettings, backend: str = "tokenline") -> Settings:
    return Settings(
        state_dir=tmp_path,
        engine=EngineSettings(backend=backend, device="simulated"),
        upstreams=(UpstreamSettings(name="far", url="https://far/v1/", api_key_env="FAR_KEY"),),
        models=models,
    )


def route(name: str, upstream: str, model: str | None = None) -> RouteSettings:
    return RouteSettings(name=name, targets=(TargetSettings(upstream=upstream, model=model),))


def test_the_engine_is_an_upstream_that_any_name_may_lead_to(tmp_path: Path) -> None:
    router = router_from(settings(tmp_path, route("alias", "engine")), {"FAR_KEY": "k"})
    assert router.models == ["simulated", "alias"]
    (target,) = router.choose("alias").targets
    assert (target.upstream.name, target.model) == ("engine", "simulated")
    assert target.upstream.unix_socket == str(tmp_path / "run" / "engine.sock")


def test_where_no_engine_runs_beside_it_an_upstream_named_engine_is_like_any_other(tmp_path: Path) -> None:
    far = UpstreamSettings(name="engine", url="http://engine:8080/v1")
    alone = settings(tmp_path, route("m", "engine"), backend="none").model_copy(update={"upstreams": (far,)})
    (target,) = router_from(alone).choose("m").targets
    assert (target.model, target.upstream.base_url) == ("m", "http://engine:8080/v1")


def test_an_upstream_has_its_own_name_for_a_model_and_its_own_key(tmp_path: Path) -> None:
    router = router_from(settings(tmp_path, route("m", "far", "org/m"), backend="none"), {"FAR_KEY": "k"})
    (target,) = router.choose("m").targets
    assert (target.model, target.upstream.base_url, target.upstream.api_key) == ("org/m", "https://far/v1", "k")


@pytest.mark.parametrize(
    ("asked", "told"), [("llma", "Did you mean 'llama'"), ("zzz", "Models here: llama."), ("", "Models here")]
)
def test_an_unknown_model_is_told_the_nearest_names(tmp_path: Path, asked: str, told: str) -> None:
    router = router_from(settings(tmp_path, route("llama", "far"), backend="none"), {"FAR_KEY": "k"})
    with pytest.raises(ApiError) as caught:
        router.choose(asked)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert told in caught.value.message


def test_a_file_may_alias_the_engine_but_not_take_its_name(tmp_path: Path) -> None:
    file = tmp_path / "tokenline.toml"
    environ = {"TOKENLINE_STATE_DIR": str(tmp_path)}
    file.write_text('[engine]\ndevice="simulated"\n[[models]]\nname="a"\ntargets=[{upstream="engine"}]\n')
    assert router_from(load_settings(file, environ).settings, {}).models == ["simulated", "a"]
    file.write_text('[engine]\ndevice="simulated"\n[[upstreams]]\nname="engine"\nurl="http://x/v1"\n')
    with pytest.raises(SettingsError, match="co-located engine"):
        load_settings(file, environ)
