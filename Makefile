# The same commands as ./dev, for the fingers that type make.
.PHONY: setup serve test test-flashinfer lint bench

setup serve test test-flashinfer lint bench:
	@./dev $@ $(ARGS)
