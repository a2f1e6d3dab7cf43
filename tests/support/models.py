"""GPUs and models from the literature, by the names that --gpu and --model take.

The numbers of a GPU are from its data sheet, except for two constants, which tests/test_plan.py
fits to published runs. A model has its published layers, widths and heads. Llama's and Mixtral's
are exactly what --block llama builds. Of the others, flags cannot say all:

    Gemma 2                  norms after attention and MLP, heads of width 128, GeGLU, windows
    DeepSeek-V3, Kimi K2     latent attention, wider heads, MLPs in their first layers
    GLM-5, Solar Open        their attention, and MLPs in their first layers
"""

import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from hybrid import PEAK_TFLOPS, GPTConfig


class Gpu(NamedTuple):
    """A GPU's speeds and memory.

    tflops: dense products in bf16. memory: GB. memory_speed, node, network: GB/s to its memory, to
    the other GPUs of its node, and to other nodes, in one direction.
    products, moves: the fractions of the tflops and of the GB/s that programs reach.
    """

    tflops: float
    memory: float
    memory_speed: float
    node: float
    network: float
    products: float = 0.57
    moves: float = 0.99
    per_node: int = 8

    def move(self, nbytes, gb_per_second):
        """Return the seconds that so many bytes take."""
        return nbytes / (self.moves * gb_per_second * 1e9)


GPUS = {  # 80 GiB are 86 GB, of which CUDA, NCCL and fragmentation take 6 GB
    "a100": Gpu(PEAK_TFLOPS["NVIDIA A100-SXM4-80GB"], 80, 2039, 300, 25, 0.69, 0.81),
    "h100": Gpu(PEAK_TFLOPS["NVIDIA H100 80GB HBM3"], 80, 3350, 450, 50),
    "h800": Gpu(PEAK_TFLOPS["NVIDIA H800"], 80, 3350, 200, 50),
    "h200": Gpu(PEAK_TFLOPS["NVIDIA H200"], 141, 4800, 450, 50),
    "b200": Gpu(PEAK_TFLOPS["NVIDIA B200"], 180, 8000, 900, 50),
    "tpu-v5p": Gpu(459, 95, 2765, 180, 180),
}
# Narayanan et al., 2021, table 1: {billions of parameters: (layers, hidden, heads)}
MEGATRON = {
    **{1.7: (24, 2304, 24), 3.6: (30, 3072, 32), 7.5: (36, 4096, 32), 18.4: (40, 6144, 48)},
    **{39.1: (48, 8192, 64), 76.1: (60, 10240, 80), 145.6: (80, 12288, 96)},
    **{310.1: (96, 16384, 128), 529.6: (105, 20480, 128), 1008.0: (128, 25600, 160)},
}
SWIGLU = partial(GPTConfig, block="llama")
LLAMA = partial(SWIGLU, seq_len=8192, vocab_size=128256, kv_heads=8, rope_theta=5e5)
MIXTRAL = partial(SWIGLU, kv_heads=8, rope_theta=1e6, experts=8, top_k=2)
MIXTURE = partial(SWIGLU, seq_len=4096, ffn=2048, top_k=8, shared_experts=1)
GEMMA = SWIGLU(46, 4608, 32, 8192, 256128, kv_heads=16, ffn=36864, head="tied")
SOLAR = MIXTURE(48, 4096, 64, vocab_size=196608, kv_heads=8, ffn=1280, experts=128)
MODELS = {  # {name: (billions of the published model's parameters, its sizes)}
    **{f"gpt-{n}b": (n, GPTConfig(*of, 2048, 51200, dropout=0.1)) for n, of in MEGATRON.items()},
    "llama3-8b": (8.030, LLAMA(32, 4096, 32, ffn=14336)),
    "llama3-70b": (70.55, LLAMA(80, 8192, 64, ffn=28672)),
    "llama3-405b": (405.9, LLAMA(126, 16384, 128, ffn=53248)),
    "gemma2-27b": (27.2, GEMMA),
    "mixtral-8x7b": (46.70, MIXTRAL(32, 4096, 32, 4096, 32000, ffn=14336)),
    "mixtral-8x22b": (140.6, MIXTRAL(56, 6144, 48, 4096, 32768, ffn=16384)),
    "deepseek-v3": (671, MIXTURE(61, 7168, 128, vocab_size=129280, experts=256, topk_nodes=4)),
    "kimi-k2": (1040, MIXTURE(61, 7168, 64, vocab_size=163840, experts=384)),
    "glm-5": (744, MIXTURE(78, 6144, 64, vocab_size=154880, experts=256)),
    "solar-open": (102.6, SOLAR),
}
