from tests.services.worker.kv.vllm.test_host_tier import *

async def explore(trial):
    async with trial:
        levels = await trial.e.ask("levels")
        again = [await trial.plain.generate(text, NEW_TOKENS) for text in trial.texts]
        print({k: levels[k] for k in ("blocks", "block_bytes")}, "again", identical(again, trial.references))
        print(await trial.round(), await trial.host())
        trial.references = again
        print(await trial.round(), await trial.host())
        outputs = await asyncio.gather(*(trial.e.generate(text, NEW_TOKENS) for text in trial.texts))
        print("at once", identical(outputs, trial.references), await trial.host(), await trial.e.ask("levels"))
        await trial.e.ask("fault", zero=True, corrupt=False)
        print("zeroed", await trial.round())
        await trial.e.ask("fault", zero=False, corrupt=False)

async def test_gemma3(tmp_path):
    await explore(Trial(make_model(FAMILIES["Gemma-3"], tmp_path), slots=600, blocks=64, block_bytes=BLOCK, async_scheduling=True))

async def test_gemma4(tmp_path):
    await explore(Trial(make_model(FAMILIES["Gemma-4"], tmp_path), slots=600, blocks=128, block_bytes=BLOCK))

async def test_latent(tmp_path):
    await explore(Trial(make_model(FAMILIES["DeepSeek-V2"], tmp_path), slots=600, blocks=16, block_bytes=512<<10, dtype="bfloat16", max_num_batched_tokens=1280))

async def test_small(tmp_path):
    await explore(Trial(make_llama(tmp_path), slots=50, blocks=64, block_bytes=BLOCK))

async def test_tp2pp2(tmp_path):
    await explore(Trial(make_llama(tmp_path, layers=4), slots=400, blocks=22, block_bytes=BLOCK, tp=2, pp=2))

async def test_eagle(tmp_path):
    model = make_llama(tmp_path / "model")
    eagle = {"method": "eagle", "model": str(make_eagle(tmp_path / "eagle", model)), "num_speculative_tokens": 3}
    await explore(Trial(model, slots=400, blocks=64, block_bytes=BLOCK*2, speculative_config=eagle))
