"""Write the pages and tables that follow from the code: `python -m docs.generate`."""

from docs.generate import algorithms, configuration, kernels, migration, models, recipes

for generator in (algorithms, configuration, kernels, migration, models, recipes):
    generator.PAGE.write_text(generator.page())
