"""GPUs and models from the literature, by the names that --gpu and --model take.

The numbers of a GPU are from its data sheet, except for two constants, which tests/test_plan.py
fits to published runs. A model is described as a GPT with the same layers, width, heads and FLOPs:
if its MLP has three matrices, ffn is 1.5 times the published width.
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


def bf16(name):
    """Return the peak of dense bf16 products in TFLOP/s of a GPU with this full name."""
    return PEAK_TFLOPS[name]["bf16"]


GPUS = {  # 80 GiB are 86 GB, of which CUDA, NCCL and fragmentation take 6 GB
    "a100": Gpu(bf16("NVIDIA A100-SXM4-80GB"), 80, 2039, 300, 25, 0.69, 0.81),
    "h100": Gpu(bf16("NVIDIA H100 80GB HBM3"), 80, 3350, 450, 50),
    "h800": Gpu(bf16("NVIDIA H800"), 80, 3350, 200, 50),
    "h200": Gpu(bf16("NVIDIA H200"), 141, 4800, 450, 50),
    "b200": Gpu(bf16("NVIDIA B200"), 180, 8000, 900, 50),
    "tpu-v5p": Gpu(459, 95, 2765, 180, 180),
}
# Narayanan et al., 2021, table 1: {billions of parameters: (layers, hidden, heads)}
MEGATRON = {
    **{1.7: (24, 2304, 24), 3.6: (30, 3072, 32), 7.5: (36, 4096, 32), 18.4: (40, 6144, 48)},
    **{39.1: (48, 8192, 64), 76.1: (60, 10240, 80), 145.6: (80, 12288, 96)},
    **{310.1: (96, 16384, 128), 529.6: (105, 20480, 128), 1008.0: (128, 25600, 160)},
}
LLAMA = partial(GPTConfig, seq_len=8192, vocab_size=128256, kv_heads=8)
MIXTURE = partial(GPTConfig, seq_len=4096, ffn=3072, top_k=8, shared_experts=1)
MIXTRAL = GPTConfig(56, 6144, 48, 4096, 32768, kv_heads=8, ffn=24576, experts=8, top_k=2)
SOLAR = MIXTURE(48, 4096, 64, vocab_size=196608, kv_heads=8, ffn=1920, experts=128)
MODELS = {  # {name: (billions of the published model's parameters, its sizes as a GPT)}
    **{f"gpt-{n}b": (n, GPTConfig(*of, 2048, 51200, dropout=0.1)) for n, of in MEGATRON.items()},
    "llama3-8b": (8.03, LLAMA(32, 4096, 32, ffn=21504)),
    "llama3-70b": (70.6, LLAMA(80, 8192, 64, ffn=43008)),
    "llama3-405b": (405.9, LLAMA(126, 16384, 128, ffn=79872)),
    "gemma2-27b": (27.2, GPTConfig(46, 4608, 32, 8192, 256128, kv_heads=16, ffn=55296)),
    "mixtral-8x22b": (140.6, MIXTRAL),
    "deepseek-v3": (671, MIXTURE(61, 7168, 128, vocab_size=129280, experts=256, topk_nodes=4)),
    "kimi-k2": (1040, MIXTURE(61, 7168, 64, vocab_size=163840, experts=384)),
    "glm-5": (744, MIXTURE(78, 6144, 64, vocab_size=154880, experts=256)),
    "solar-open": (102.6, SOLAR),
}
