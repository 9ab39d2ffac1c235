"""What runs inside vLLM: its offloading connector, telling the picker all it must know.

vLLM finds it by `kv_connector_module_path: "connector.vllm"`; needs nothing that vLLM does not bring itself.
"""

from connector.vllm import versions

versions.check()
try:
    from connector.vllm.offloading import TieredOffloadingConnector
except ImportError as error:
    if not (error.name or "").startswith("vllm"):
        raise
    raise ImportError(versions.unusable(error)) from error

__all__ = ["TieredOffloadingConnector"]
