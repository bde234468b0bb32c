"""Imports run one way: what each part may know of the others, by reading the source alone."""

import ast
import pathlib

from absl.testing import absltest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / 'stppo_jax'

# Part -> the parts that it may import, besides itself.
ALLOWED = {
    'types': '', 'assets': '', 'huge_pages': '',
    'config': 'types', 'metrics': 'types', 'algorithms': 'types', 'models': 'types',
    'tasks': 'types', 'chat': 'types', 'envs': 'types', 'retrieval': 'types tasks',  # the server reads a corpus
    'lifeline': '', 'hosts': 'types lifeline envs',
    'report_charts': 'types', 'report': 'types metrics report_charts',
    'rollout': 'types hosts models tasks chat envs retrieval',
    'evaluation': 'types hosts config models tasks chat envs retrieval rollout',
    'training': 'types hosts metrics report algorithms models tasks chat envs retrieval rollout '
                'evaluation',
    'plan_hlo': '', 'topologies': 'types',
    'plan': 'types plan_hlo topologies models evaluation training',
}
READ_THE_CONFIG = {'training/loop.py', 'training/parts.py', 'evaluation.py', 'plan.py'}


class LayeringTest(absltest.TestCase):

  def test_imports_run_one_way(self):
    for path in PACKAGE.rglob('*.py'):
      name = path.relative_to(PACKAGE).as_posix()
      part = name.split('/')[0].removesuffix('.py')
      if part == '__init__':
        continue
      self.assertIn(part, ALLOWED, f'{name}: a new part; say here what it may import')
      allowed = {part, *ALLOWED[part].split()} | ({'config'} if name in READ_THE_CONFIG else set())
      for module in imports(path):
        top, _, rest = module.partition('.')
        self.assertNotIn(top, ('run', 'experiments', 'tests', 'benchmarks'), name)
        if top == 'stppo_jax':
          self.assertIn(rest.split('.')[0], allowed, f'{name} imports {module}')

  def test_experiments_do_not_import_the_command_line_or_the_tests(self):
    for path in (ROOT / 'experiments').rglob('*.py'):
      self.assertNoCommonElements(
          {module.split('.')[0] for module in imports(path)}, {'run', 'tests', 'benchmarks'})

  def test_only_these_files_read_the_config(self):
    """Others take values. (Their `config`, where they have one, is a model's: no sections.)"""
    sections = {'data', 'env', 'retriever', 'model', 'rollout', 'algorithm', 'train', 'placement', 'eval',
                'log', 'pipeline', 'health'}
    for path in PACKAGE.rglob('*.py'):
      name = path.relative_to(PACKAGE).as_posix()
      read = {node.attr for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute)
              and isinstance(node.value, ast.Name) and node.value.id == 'config'}
      if name not in READ_THE_CONFIG | {'config.py'}:
        self.assertNoCommonElements(read, sections, name)

  def test_no_drawer_for_everything_and_no_hidden_defaults(self):
    for path in [*PACKAGE.rglob('*.py'), *(ROOT / 'experiments').rglob('*.py'), ROOT / 'run.py']:
      self.assertNotIn(path.stem, ('utils', 'util', 'helpers', 'common', 'misc'))
      for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and getattr(node.func, 'id', '') == 'getattr':
          self.assertFalse(len(node.args) == 3 and 'config' in ast.unparse(node.args[0]),
                           f'{path}:{node.lineno}: {ast.unparse(node)}')


def parse(path):
  return ast.parse(path.read_text(encoding='utf-8'))


def imports(path):
  """Names of all modules that a file imports, wherever in it: 'stppo_jax.models.decoder'."""
  for node in ast.walk(parse(path)):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: a relative import'
      yield from (f'{node.module}.{alias.name}' for alias in node.names)


if __name__ == '__main__':
  absltest.main()
