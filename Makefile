# The same without make: bash scripts/demo.sh, bash scripts/test.sh

.PHONY: demo demo-moe demo-vlm test test-all lint site clean

demo: ## set up, make the tiny model, train it by GRPO; make demo ARGS="grpo.seed=2"
	@bash scripts/demo.sh $(ARGS)

demo-moe: ## the same with a mixture of experts, over two expert-parallel workers
	@bash scripts/demo.sh --experts $(ARGS)

demo-vlm: ## the same with pictures: a tiny vision-language model learns to count red circles
	@bash scripts/demo.sh --images $(ARGS)

test: ## set up, lint, types, import rules, unit and functional tests
	@bash scripts/test.sh

test-all: ## and the slow tests
	@bash scripts/test.sh --all

lint: ## only what reads the code
	@bash scripts/test.sh --lint

site: ## docs/ as a site, in site/
	@bash scripts/setup.sh --dev
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build

clean: ## back to a fresh clone, but for the runs
	rm -rf .venv .venv-cpu .cache build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
