"""What vLLM's own Grafana dashboard asks: examples/observability/prometheus_grafana/grafana.json."""

MODEL = 'model_name="$model_name"'
_QUANTILES = (
    "vllm:e2e_request_latency_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_to_first_token_seconds",
)
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
_HEATMAPS = ("vllm:request_prompt_tokens", "vllm:request_generation_tokens")
_RATES = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_max_num_generation_tokens_sum",
)


def vllm_queries(model: str, window: str) -> list[str]:
    """All of them."""
    found = [f"{name}{{{MODEL}}}" for name in _GAUGES]
    for name in _QUANTILES:
        rate = f"sum by(le) (rate({name}_bucket{{{MODEL}}}[$w]))"
        found += [f"histogram_quantile({share}, {rate})" for share in (0.99, 0.95, 0.9, 0.5)]
        found.append(f"rate({name}_sum{{{MODEL}}}[$w]) / rate({name}_count{{{MODEL}}}[$w])")
    found += [f"sum by(le) (increase({name}_bucket{{{MODEL}}}[$w]))" for name in _HEATMAPS]
    found += [f"rate({name}{{{MODEL}}}[$w])" for name in _RATES]
    found.append(f"sum by(finished_reason) (increase(vllm:request_success_total{{{MODEL}}}[$w]))")
    return [query.replace("$model_name", model).replace("$w", window) for query in found]
