"""Reports, to be read. What draws them is an extra: `pip install "reactivate[report]"`."""
