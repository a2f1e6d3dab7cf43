"""Count the bytes that a rank holds of a model in training."""

from collections import Counter

import torch

from zero import FullyShardedDataParallel


def memory_ledger(models, optimizer):
    """Return this rank's bytes of storages as a Counter of "parameters", "gradients", "optimizer".

    models: one model, or a list of models that share the optimizer. A storage that several kinds
    share is counted as the first of them.
    """
    models = models if isinstance(models, list) else [models]
    sharded = [model for model in models if isinstance(model, FullyShardedDataParallel)]
    flats = [flat for model in sharded for flat in model.flats]
    parameters = [parameter for model in models for parameter in model.parameters()]
    gradients = [parameter.grad for parameter in parameters]
    inner = getattr(optimizer, "optimizer", optimizer)
    states = [value for state in inner.state.values() for value in state.values()]
    masters = [parameter for group in inner.param_groups for parameter in group["params"]]
    kinds = {
        "parameters": parameters + [flat.unsharded_param for flat in flats],
        "gradients": gradients + [flat.flat_grad for flat in flats],
        "optimizer": states + masters,
    }
    seen, ledger = set(), Counter()
    for kind, tensors in kinds.items():
        for tensor in filter(torch.is_tensor, tensors):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                ledger[kind] += storage.nbytes()
    return ledger
