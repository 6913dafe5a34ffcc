"""The Megatron engine. Importing it prepares the device seam, which must precede every Megatron import."""

from megatron_stare.engine import device

device.prepare()
