"""The library behind the workbook: a Transformer, its attention kernels, and the tools that measure them."""
