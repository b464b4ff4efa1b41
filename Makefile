# The same commands as ./dev, for the fingers that type make.
.PHONY: setup serve test lint bench

setup serve test lint bench:
	@./dev $@ $(ARGS)
