"""Compile options of kernels that must agree bit for bit: the compiler may not fuse multiplications and additions on its own, only
where the code says so."""

NO_FP_FUSION = {"enable_fp_fusion": False}
