"""Images in requests: what the gateway makes of them for instances, and what it refuses.

The model is a small Gemma-3 with its own processor; the instances have no engines.
"""

import asyncio
import base64
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import pytest_asyncio
from vllm.exceptions import VLLMValidationError
from vllm.multimodal import audio
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.serial_utils import MsgpackDecoder

from benchmarks.media_models import GEMMA, chat, picture
from gateway.app import prepare_environment, running
from gateway.auth import KeyRing
from gateway.media import MAX_ITEMS, Fetcher, Media, with_limits
from gateway.settings import GatewaySettings
from gateway.vllm_patches import resample_without_torchaudio
from services.worker.engines.vllm import MediaFeatures
from shared.domain.job import Generation
from shared.domain.prompt import hashes_of
from tests.gateway.api import Api, listening
from tests.gateway.cluster import running_cluster

pytest.importorskip("torchvision", reason="vLLM's code for the model needs torchvision")
pytestmark = pytest.mark.slow
in_module = pytest.mark.asyncio(loop_scope="module")  # the loop of the gateway
IMAGE_TOKENS = 16  # that the encoder computes
ITEM_TOKENS = IMAGE_TOKENS + 6  # with the words around them


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    folder = tmp_path_factory.mktemp("media")
    (folder / "allowed").mkdir()
    prepare_environment()
    async with running_cluster() as cluster:
        settings = GatewaySettings(
            schedulers=(cluster.scheduler_address,),
            model=str(GEMMA.make(folder / "model")),
            served_model_name="demo",
            patience_s=0.5,
            max_media_bytes=400_000,
            vllm_args={"allowed_local_media_path": str(folder / "allowed"), "limit_mm_per_prompt": {"image": 6}},
        )
        async with (
            running(settings, KeyRing(())) as edge,
            listening(edge) as server,
            httpx.AsyncClient(base_url=server.url, timeout=60) as client,
        ):
            yield Api(client, cluster, edge, settings)


@pytest.fixture
def api(gateway: Api) -> Api:
    gateway.reset()
    gateway.cluster.places.clear()
    gateway.cluster.split, gateway.cluster.wants_prefix = None, False
    return gateway


async def say(api: Api, *parts: str, **more: Any) -> httpx.Response:
    return await api.post("/v1/chat/completions", {"messages": chat(*parts), "max_tokens": 6, **more})


async def generations(api: Api, *parts: str, **more: Any) -> list[tuple[Generation, int]]:
    """What instances receive for each job of a request, prefill instances first, with the number of prompt tokens."""
    api.reset()
    response = await say(api, *parts, **more)
    assert response.status_code == 200, response.text
    requests = [*api.cluster.prefill.prefills, *(each for worker in api.cluster.decodes for each in worker.decodes)]
    return [(each.generation, each.prompt_tokens) for each in requests]


def features_of(generation: Generation) -> list[MultiModalFeatureSpec]:
    found: list[MultiModalFeatureSpec] = MsgpackDecoder(list[MultiModalFeatureSpec]).decode(generation.media)
    return found


@in_module
async def test_both_instances_receive_the_items_and_their_data(api: Api) -> None:
    (first, _), (second, _) = await generations(api, "What is this?", picture(1), "and this?", picture(2))
    assert first.items == second.items
    assert first.media == second.media
    assert [(item.modality, item.tokens) for item in first.items] == [("image", ITEM_TOKENS)] * 2
    features = features_of(first)
    assert [each.data["pixel_values"].data.shape for each in features] == [(1, 3, 112, 112)] * 2
    places = [(each.identifier, each.mm_position.offset, each.mm_position.length) for each in features]
    assert places == [(item.digest, item.start, item.tokens) for item in first.items]
    assert [place.job.media for place in api.cluster.places] == [("image",)]


@in_module
async def test_data_is_sent_again_with_each_request(api: Api) -> None:
    """vLLM's front end would send an engine that has had an item only its hash."""
    first, again = [(await generations(api, picture(3), "Again."))[0][0] for _ in range(2)]
    assert (first.items, first.media) == (again.items, again.media)
    assert all(each.data is not None for each in features_of(again))


@in_module
async def test_items_are_told_apart_by_their_content(api: Api) -> None:
    api.cluster.wants_prefix = True
    await say(api, "Hello")  # from here on placements have prefixes
    long = "the same words " * 20
    texts = [("", 4), ("", 5), (long, 4), (long, 5)]
    jobs = []
    for text, seed in texts:
        api.cluster.places.clear()
        ((generation, tokens), *_) = await generations(api, text, picture(seed), long)
        jobs.append((generation, tokens, api.cluster.places[0].job.prefix))
    digests = [generation.items[0].digest for generation, _, _ in jobs]
    assert digests[0] == digests[2] != digests[1] == digests[3]
    assert {tokens for _, tokens, _ in jobs[:2]} == {jobs[0][1]}  # the same tokens
    first, second, third, fourth = (prefix for _, _, prefix in jobs)
    assert not set(first) & set(second)
    before = jobs[2][0].items[0].start // 64  # whole blocks of text before the image
    assert before
    assert third[:before] == fourth[:before]
    assert not set(third[before:]) & set(fourth[before:])
    prompt = api.cluster.prefill.prefills[-1].prompt
    assert fourth == hashes_of(prompt, items=jobs[3][0].items)


@in_module
@pytest.mark.parametrize("within", [1, ITEM_TOKENS - 1])
async def test_a_split_within_an_item_moves_behind_it(api: Api, within: int) -> None:
    ((whole, _), *_) = await generations(api, "Look: ", picture(6), "Well?")
    item = whole.items[0]
    api.cluster.split = item.start + within
    (_, prefilled), (_, decoded) = await generations(api, "Look: ", picture(6), "Well?")
    assert prefilled == item.end < decoded
    assert (await api.final_reports(1))[0].split == item.end


@in_module
@pytest.mark.parametrize("split", ["start", "end"])
async def test_a_split_beside_an_item_stays(api: Api, split: str) -> None:
    ((whole, _), *_) = await generations(api, "Look: ", picture(6), "Well?")
    api.cluster.split = getattr(whole.items[0], split)
    (_, prefilled), _ = await generations(api, "Look: ", picture(6), "Well?")
    assert prefilled == api.cluster.split


@in_module
async def test_a_lost_decode_continues_with_the_same_items(api: Api) -> None:
    api.cluster.lose_decodes_at(3)
    try:
        response = await say(api, picture(7), "Go on.")
    finally:
        for worker in api.cluster.decodes:
            worker.before_token = None
    assert response.status_code == 200, response.text
    decodes = [request for worker in api.cluster.decodes for request in worker.decodes]
    assert len(decodes) > 1
    assert len({request.generation.media for request in decodes}) == 1
    assert len({request.generation.items for request in decodes}) == 1


@in_module
async def test_answers_of_one_request_share_the_data(api: Api) -> None:
    found = await generations(api, picture(8), "Twice.", n=2)
    assert len(found) == 4
    assert len({generation.media for generation, _ in found}) == 1


@in_module
async def test_text_carries_nothing(api: Api) -> None:
    for generation, _ in await generations(api, "Only words."):
        assert generation.items == ()
        assert generation.media == b""
    assert api.cluster.places[-1].job.media == ()


SOUND = {"type": "input_audio", "input_audio": {"data": "aGVsbG8=", "format": "wav"}}
FILM = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aGVsbG8="}}
EMBEDS = {"type": "image_embeds", "image_embeds": "aGVsbG8="}


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (SOUND, "audio: this model has no such input"),
    (FILM, "video: this model has no such input"),
    (EMBEDS, ""),
    (image("data:image/png;base64,aGVsbG8="), "cannot be used"),
    (image("data:image/png,hello"), "cannot be used"),
    (image("data:image/png;base64,%"), "cannot be used"),
    (image("http://127.0.0.1:9/a.png"), "allowed_media_domains"),
    (image("HTTPS://localhost/a.png"), "allowed_media_domains"),
    (image(" http://127.0.0.1:9/a.png"), "cannot be used"),
    (image("ftp://localhost/a.png"), "cannot be used"),
    (image("file:///etc/passwd"), "cannot be used"),
    (image("a.png"), "cannot be used"),
    (image(picture(1), uuid="mine"), "uuid: media items are known by their content"),
    ({"type": "image_url", "image_url": None, "uuid": "mine"}, "uuid: media items are known by their content"),
]


@in_module
@pytest.mark.parametrize(("part", "message"), REFUSED)
async def test_what_is_not_served_is_refused_by_name(api: Api, part: dict[str, Any], message: str) -> None:
    body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}], "max_tokens": 2}
    response = await api.post("/v1/chat/completions", body)
    assert (response.status_code, message in response.text) == (400, True), response.text
    await api.idle()
    assert not api.cluster.places


@in_module
async def test_too_many_and_too_large_items_are_refused(api: Api) -> None:
    response = await say(api, *(picture(seed) for seed in range(7)))
    assert response.status_code == 400
    assert "At most 6 image(s)" in response.text
    response = await say(api, *(picture(seed) for seed in range(6)))
    assert response.status_code == 400, response.text
    assert "bytes once they are processed, the limit is 400000" in response.text
    await api.idle()
    assert api.admission.held_bytes.total == 0


@in_module
async def test_a_file_in_the_allowed_folder_is_read(api: Api, gateway: Api) -> None:
    folder = Path(gateway.settings.vllm_args["allowed_local_media_path"])
    (folder / "a.png").write_bytes(base64.b64decode(picture(9).partition(",")[2]))
    ((from_file, _), *_) = await generations(api, f"file://{folder}/a.png")
    ((from_data, _), *_) = await generations(api, picture(9))
    assert from_file == msgspec.structs.replace(from_data, arrived_s=from_file.arrived_s)


class Redirecting(BaseHTTPRequestHandler):
    """Answers a picture, or a redirect to one."""

    paths: list[str] = []

    def do_GET(self) -> None:
        self.paths.append(self.path)
        if self.path == "/moved.png":
            self.send_response(302)
            self.send_header("Location", "/a.png")
            self.end_headers()
            return
        data = base64.b64decode(picture(1).partition(",")[2])
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@in_module
async def test_images_are_fetched_from_allowed_hosts_without_redirects(api: Api) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Redirecting)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    model = api.state.engine_client.model_config
    model.allowed_media_domains = ["127.0.0.1"]
    try:
        ((fetched, _), *_) = await generations(api, f"{url}/a.png")
        ((sent, _), *_) = await generations(api, picture(1))
        assert fetched == msgspec.structs.replace(sent, arrived_s=fetched.arrived_s)
        moved = await say(api, f"{url}/moved.png")
        assert 400 <= moved.status_code < 500, moved.text
        assert Redirecting.paths.count("/a.png") == 1
        other = await say(api, f"http://localhost:{server.server_port}/a.png")
        assert (other.status_code, "allowed domains" in other.text) == (400, True), other.text
    finally:
        model.allowed_media_domains = []
        server.shutdown()
        server.server_close()


@in_module
async def test_other_apis_take_images(api: Api) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": picture(1).partition(",")[2]}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "?"}]}]
    response = await api.post("/v1/messages", {"messages": messages, "max_tokens": 3})
    assert response.status_code == 200, response.text
    item = {"type": "input_image", "image_url": picture(1), "detail": "auto"}
    response = await api.post("/v1/responses", {"input": [{"role": "user", "content": [item]}], "max_output_tokens": 3})
    assert response.status_code == 200, response.text
    assert all(len(each.generation.items) == 1 for each in api.cluster.prefill.prefills)


@in_module
async def test_streams_take_images(api: Api) -> None:
    whole = (await say(api, picture(1, 8, 8), "?")).json()["usage"]["prompt_tokens"]
    response = await say(api, picture(1, 8, 8), "?", stream=True, stream_options={"include_usage": True})
    assert response.status_code == 200
    assert f'"prompt_tokens":{whole}' in response.text.replace(" ", "")


# Without a gateway


def test_limits_of_items_are_defaults_beneath_the_operators() -> None:
    name = "limit_mm_per_prompt"
    assert with_limits({})[name] == MAX_ITEMS
    assert with_limits({name: {"image": 2}})[name] == {**MAX_ITEMS, "image": 2}
    assert with_limits({name: '{"video": 0}'})[name] == {**MAX_ITEMS, "video": 0}
    assert with_limits({f"{name}.image": 3}) == {f"{name}.image": 3, f"{name}.audio": 1, f"{name}.video": 1}


def test_refusals_name_the_reason() -> None:
    assert "only text" in Media().refusal("image")
    assert Media(frozenset({"image"}), "no such").refusal("image") == ""
    assert Media(frozenset({"image"}), "no such").refusal("audio") == "no such"
    assert "embeddings" in Media(frozenset({"image"}), "no such").refusal("image_embeds")


@in_module
async def test_what_cannot_be_decoded_is_refused_with_the_cause() -> None:
    """Also where a library for it is missing."""
    with pytest.raises(VLLMValidationError, match=r"cannot be used: .+"):
        await Fetcher().fetch_audio_async("data:audio/wav;base64,aGVsbG8=")


@in_module
async def test_a_missing_library_is_the_reason_of_a_refusal(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'decoder'")

    renderer = api.state.engine_client.renderer
    monkeypatch.setattr(renderer.mm_processor, "apply", lacks)
    response = await say(api, picture(11))
    assert response.status_code == 400
    assert "cannot be processed here: No module named 'decoder'" in response.text


def test_sounds_get_the_rate_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "resample_audio_torchaudio", audio.resample_audio_torchaudio)
    resample_without_torchaudio()
    tone = np.sin(np.arange(8_000) / 20).astype(np.float32)
    assert audio.AudioResampler(16_000).resample(tone, orig_sr=8_000).shape == (16_000,)


@in_module
async def test_an_engine_refuses_items_that_it_cannot_compute(api: Api) -> None:
    ((generation, tokens), *_) = await generations(api, picture(1), "?")
    item = generation.items[0]
    cases: list[tuple[MediaFeatures, int, str]] = [
        (MediaFeatures(), tokens, "processes no image items"),
        (MediaFeatures(("image",), IMAGE_TOKENS - 1), tokens, "computes at most 15"),
        (MediaFeatures(("image",), IMAGE_TOKENS), item.start + 1, "end within an item"),
    ]
    for features, prompt, message in cases:
        with pytest.raises(ValueError, match=message):
            features.features(generation, prompt)
    able = MediaFeatures(("image",), IMAGE_TOKENS)
    assert len(able.features(generation, tokens) or ()) == 1
    assert able.features(generation, item.start) is None
    assert able.features(Generation(b"", 0.0), tokens) is None


@in_module
async def test_a_model_whose_processor_does_not_load_serves_its_text(tmp_path: Path, api: Api) -> None:
    from gateway.app import _arguments
    from gateway.media import model_config

    folder = GEMMA.make(tmp_path / "model")
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").unlink()
    settings = GatewaySettings(schedulers=("s",), model=str(folder), dtype="float32", max_model_len=512)
    config, media = await asyncio.to_thread(model_config, _arguments(settings), {})
    assert not config.supports_multimodal_inputs
    assert "serves the text of this model alone, because its processor does not load" in media.refusal("image")
