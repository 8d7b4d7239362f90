"""What the serving workloads share: the engine's sizes by tier, to be spread into a workload with ``**``."""

#: A model of three layers: the engine's own work dominates.
TINY = {
    "model": "tiny",
    "dtype": "float32",
    "trace": "synthetic",
    "requests": 24,
    "request_rate": 0.0,
    "burstiness": 1.0,
    "prompt_median": 24.0,
    "output_median": 12.0,
    "sigma": 0.8,
    "time_scale": 1.0,
    "length_scale": 1.0,
    "max_prompt": 96,
    "max_output": 48,
    "slots": 4,
    "step_tokens": 64,
    "block_size": 16,
    "cache_tokens": 1024,
}

#: Real weights that a laptop serves.
REAL = {
    **TINY,
    "model": "smollm2-135m-instruct",
    "requests": 32,
    "prompt_median": 64.0,
    "output_median": 24.0,
    "max_prompt": 256,
    "max_output": 64,
    "slots": 8,
    "step_tokens": 128,
    "cache_tokens": 4096,
}

#: A model of Llama-3-8B's shape on one large GPU: 131 kB of cache a token in bfloat16, 17 GB in all.
LARGE = {
    **TINY,
    "model": "llama-3-8b",
    "dtype": "bfloat16",
    "requests": 256,
    "prompt_median": 512.0,
    "output_median": 128.0,
    "max_prompt": 4096,
    "max_output": 1024,
    "slots": 64,
    "step_tokens": 2048,
    "cache_tokens": 131072,
}

#: One hour of a public cloud service's conversations, and of Kimi's: the files come with --trace.
AZURE = {**LARGE, "trace": "AzureLLMInferenceTrace_conv.csv", "request_rate": 8.0}
MOONCAKE = {
    **LARGE,
    "trace": "mooncake_conversation_trace.jsonl",
    "request_rate": 1.0,
    "max_prompt": 7168,
    "requests": 128,
}

#: The Azure trace cut down to what real weights on two cores serve in under a minute.
AZURE_SMALL = {
    **REAL,
    "trace": "AzureLLMInferenceTrace_conv.csv",
    "requests": 64,
    "length_scale": 0.03125,
    "time_scale": 0.1,
}
