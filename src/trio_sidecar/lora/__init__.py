"""LoRA adapters: their lifecycle, their records in discovery, and the locks between the two and requests (spec 13)."""

from trio_sidecar.lora.gate import AdapterGate
from trio_sidecar.lora.inventory import Adapter, discovery_suffix
from trio_sidecar.lora.manager import LoraManager, LoraSettings
from trio_sidecar.lora.records import Publisher, Records
from trio_sidecar.lora.requests import LoraError

__all__ = [
    "Adapter",
    "AdapterGate",
    "LoraError",
    "LoraManager",
    "LoraSettings",
    "Publisher",
    "Records",
    "discovery_suffix",
]
