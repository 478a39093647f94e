"""How kernels are compiled whose results must not depend on which of them computes a number: products and sums are rounded, or
fused, as they are written, and never as a compiler finds best for the kernel at hand."""

AS_WRITTEN = {"enable_fp_fusion": False}
