"""`cupy.fft`: empty, but array_api_compat imports it."""

__all__: list[str] = []
