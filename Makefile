# The same commands as ./dev, for the fingers that type make.
.PHONY: setup serve test test-flashinfer test-ray test-crosscheck test-container test-sm100 lint bench

setup serve test test-flashinfer test-ray test-crosscheck test-container test-sm100 lint bench:
	@./dev $@ $(ARGS)
