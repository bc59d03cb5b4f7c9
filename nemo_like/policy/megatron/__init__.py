import warnings

# Megatron-core says so at each import, several times; where kernels are missed, a run's plan names them.
warnings.filterwarnings("ignore", message=r"(Transformer Engine and )?Apex (are|is) not installed")
