"""Imports run one way, also those of names in strings. Sources are read, and one run is started."""

import ast
import collections
import dataclasses
import functools
import graphlib
import pathlib
import re
import subprocess
import sys
import tokenize

from absl.testing import absltest

from stppo_jax import config as config_lib

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / 'stppo_jax'

# Rooms and modules from the bottom up: each may import those before it, and itself.
ORDER = (
    'requirements',
    'types',
    'stop_signal',
    'plugins',
    'text',
    'algorithms',
    'systems',
    'algorithms/variants',  # its rows name the parts of systems
    'config',
    'settings',
    'models',
    'data',
    'net',
    'envs',
    'distributed',
    'retrieval',
    'rollout',
    'assembly',
    'monitoring',
    'atif',
    'serving',
    'training',
    'planning',
    'evaluation',
    'cli',
)
# Rooms below that a room must not import: losses see no model, and models see no question.
NOT_ALLOWED = {
    'text': 'plugins stop_signal requirements',
    'config': 'plugins text',
    'settings': 'text',
    'models': 'config settings plugins algorithms systems text',
    'data': 'config settings plugins algorithms systems models',
    'envs': 'config settings algorithms systems models',
    'net': 'config settings plugins algorithms systems models data text',
    'distributed': 'config settings plugins algorithms systems models data text envs',
    'retrieval': 'config settings plugins algorithms systems models text envs distributed',
    'rollout': 'settings algorithms systems',
    'monitoring': 'settings algorithms systems assembly',
    'atif': 'settings algorithms systems models assembly',
    'serving': 'settings algorithms systems monitoring atif',
    'training': 'serving',
}
# Only these take the whole config; all others take the values that they need.
READ_THE_CONFIG = {
    'training/loop.py',
    'settings/objective.py',
    'training/recovery.py',
    'training/run.py',
    'training/learner.py',
    'training/sft.py',
    'evaluation/policy.py',
    'rollout/agent.py',
    'rollout/engines.py',
    'rollout/prepare.py',
    'assembly/agents.py',
    'assembly/components.py',
    'monitoring/scores.py',
    'serving/gateway.py',
    'evaluation/job.py',
    'evaluation/players.py',
    'evaluation/remote.py',
    'evaluation/chat.py',
    'evaluation/sample.py',
    'serving/rollouts.py',
    'settings/validation.py',
    'settings/sections/allocation.py',
    'settings/sections/data_columns.py',
    'settings/sections/demonstrations.py',
    'settings/sections/engine.py',
    'settings/sections/folders.py',
    'settings/sections/mix.py',
    'settings/sections/row_objective.py',
    'settings/sections/teacher.py',
    'settings/sections/value_bins.py',
    'monitoring/workdir.py',
    'planning/plan.py',
    'planning/programs.py',
    'cli/doctor.py',
    'cli/entry.py',
    'cli/env_server.py',
    'cli/check_data.py',
    'cli/config_file.py',
    'cli/help.py',
    'cli/policies.py',
    'cli/atif.py',
    'cli/saved_config.py',
}

# Modules and rooms that know software of other people. docs/dev/guests.md has a line for each.
GUESTS = (
    'atif',
    'data.conversations',
    'data.layout_fit',
    'data.layout_profile',
    'data.layout_values',
    'data.layouts',
    'data.public_formats',
    'envs.adapters',
    'envs.custom_rewards',
    'models.families.experts',
    'models.families.gemma',
    'models.families.llama',
    'models.families.olmo',
    'models.families.qwen',
    'models.families.qwen35',
    'models.families.smollm',
    'models.families.windowed',
    'monitoring.buckets',
    'monitoring.tracker',
    'rollout.engines',
    'rollout.remote',
    'rollout.servers',
    'rollout.shared_devices',
    'serving.api',
    'serving.env_server',
    'serving.grammars',
    'serving.messages',
    'serving.prompt_scores',
    'serving.responses',
    'serving.text_schemas',
)
# All other modules that may name a guest, by an import or in a string, and the guest.
DOORS = {
    'assembly.agents': 'rollout.engines',
    'assembly.components': 'envs.adapters envs.custom_rewards',
    'cli.atif': 'atif',
    'cli.check_data': 'data.conversations',
    'cli.env_server': 'serving.env_server',
    'data.tasks': 'data.public_formats',
    'models.families': (
        'models.families.experts models.families.gemma models.families.llama models.families.olmo '
        'models.families.qwen models.families.qwen35 models.families.smollm'
    ),
    'models.hf_weights': 'models.families.experts',
    'monitoring.metrics': 'monitoring.tracker',
    'monitoring.workdir': 'monitoring.buckets',
    'serving.answers': 'serving.prompt_scores',
    'serving.gateway': 'serving.grammars',
    'serving.scheduler': 'serving.grammars serving.prompt_scores',
    'serving.server': 'serving.api serving.messages serving.responses',
    'serving.service': 'serving.api serving.grammars serving.prompt_scores',
    'training.checkpoint': 'monitoring.buckets',
    'training.run': 'rollout.engines',
    'training.sft': 'data.conversations',
}

# Tables whose strings name modules of rooms above them.
UPWARD = {'assembly.agents'}

# A run imports these modules and packages if its config names them.
OPTIONAL = (
    'algorithms.checks',
    'algorithms.objectives',
    'atif',
    'cli.atif',
    'cli.check_data',
    'cli.compare',
    'cli.doc_pages',
    'cli.doctor',
    'cli.env_server',
    'cli.help',
    'cli.new',
    'cli.planning',
    'cli.policies',
    'cli.records',
    'cli.saved_config',
    'cli.serving',
    'cli.sft',
    'cli.texts',
    'data.cells',
    'data.conversations',
    'data.layout_fit',
    'data.layout_profile',
    'data.layout_values',
    'data.layouts',
    'data.mix',
    'data.public_formats',
    'data.row_objects',
    'data.row_tables',
    'distributed.determinism',
    'distributed.messages',
    'envs.adapters',
    'envs.commands',
    'envs.custom_rewards',
    'envs.isolation',
    'envs.mix',
    'envs.program',
    'envs.served',
    'envs.tool_runners',
    'envs.tools',
    'evaluation.job',
    'evaluation.players',
    'evaluation.policy',
    'models.attention_kernels',
    'models.convert',
    'models.delta_net',
    'models.families.experts',
    'models.families.gemma',
    'models.families.llama',
    'models.families.olmo',
    'models.families.qwen35',
    'models.families.smollm',
    'models.families.windowed',
    'models.head_chunks',
    'models.hf_export',
    'models.lora',
    'models.moe',
    'models.context_parallel',
    'models.presets',
    'models.rope_scaling',
    'models.vocabulary',
    'monitoring.buckets',
    'monitoring.shared_folder',
    'monitoring.tracker',
    'monitoring.viewer',
    'net.http_client',
    'net.http_server',
    'planning',
    'retrieval.dense',
    'retrieval.http',
    'rollout.demonstrations',
    'rollout.engines',
    'rollout.remote',
    'rollout.sampling_mesh',
    'rollout.saved',
    'rollout.servers',
    'rollout.shared_devices',
    'rollout.split_envs',
    'rollout.weight_folders',
    'serving',
    'settings.sections',
    *(f'systems.{path.stem}' for path in PACKAGE.glob('systems/[a-z]*.py') if path.stem != 'parts'),
    'text.template',
    'text.tool_calls',
    'text.turns',
    'training.offload',
    'training.sft',
    'training.supervised',
    'training.teacher',
)


class LayeringTest(absltest.TestCase):

  def test_imports_run_one_way(self):
    for path in PACKAGE.rglob('*.py'):
      name = path.relative_to(PACKAGE).as_posix()
      room = name.removesuffix('.py')
      room = room if room in ORDER else room.split('/')[0]
      if room in ('__init__', 'assets'):
        continue
      self.assertIn(room, ORDER, f'{name}: a new room; say in ORDER where it stands')
      forbidden = NOT_ALLOWED.get(room, '').split()
      below = ORDER[: ORDER.index(room) + 1]
      allowed = {other for other in below if other.split('/')[0] not in forbidden}
      if name in READ_THE_CONFIG:
        allowed.add('config')
      elif room not in ('config', 'cli'):
        allowed.discard('config')
      for module in [*imports(path), *strings_without(UPWARD, path)]:
        top, _, rest = module.partition('.')
        self.assertNotIn(
            top,
            ('run', 'experiments', 'scripts', 'examples', 'tests', 'benchmarks', 'research'),
            name,
        )
        if top == 'stppo_jax' and module != 'stppo_jax.assets':
          parts = rest.split('.')
          imported = '/'.join(parts[:2])
          self.assertIn(
              imported if imported in ORDER else parts[0], allowed, f'{name} imports {module}'
          )

  def test_every_room_lists_its_files(self):
    for room in sorted(PACKAGE.rglob('__init__.py')):
      listed = ast.get_docstring(ast.parse(room.read_text(encoding='utf-8'))) or ''
      files = {path.name for path in room.parent.glob('*.py')} - {'__init__.py', 'run.py'}
      names = set(re.findall(r'\w+\.py\b', listed)) - {'run.py'}  # run.py of the repository
      self.assertEqual(names, files, room)

  def test_no_imports_run_in_circles(self):
    """Imports inside functions, behind TYPE_CHECKING and by a name in a string count, too."""
    graph = {
        module_name(path): imported(path) | named_in_strings(path) for path in PACKAGE.rglob('*.py')
    }
    order = [*graphlib.TopologicalSorter(graph).static_order()]  # raises CycleError
    table, part = 'stppo_jax.systems.parts', 'stppo_jax.systems.cispo'  # named in a string alone
    self.assertLess(order.index(part), order.index(table))

  def test_only_doors_name_a_guest(self):
    doors = collections.defaultdict(set)
    for path in PACKAGE.rglob('*.py'):
      name = module_name(path)
      if not guests_with(name):
        for module in imported(path) | named_in_strings(path):
          doors[name.removeprefix('stppo_jax.')] |= guests_with(module)
    named = {name: guests for name, guests in doors.items() if guests}
    self.assertEqual(named, {name: set(guests.split()) for name, guests in DOORS.items()})

  def test_names_in_strings_are_followed(self):
    for text, modules in (
        ("'stppo_jax.rollout.engines:with_engines'", {'stppo_jax.rollout.engines'}),
        ("'stppo_jax.atif.reader'", {'stppo_jax.atif.reader'}),
        ("'stppo_jax.atif'", {'stppo_jax.atif'}),
        ("f'stppo_jax.models.families.{name}'; x = 'gemma'", {'stppo_jax.models.families.gemma'}),
        ("'stppo_jax.models.families.' + {'a': 'gemma:F'}", {'stppo_jax.models.families.gemma'}),
        ("'gemma'", set()),
        ("'see stppo_jax.atif.reader'", set()),
        ("'stppo_jax.no_such_module'", set()),
    ):
      self.assertEqual(modules_in_strings(ast.parse(text)), modules, text)

  def test_default_run_imports_no_optional_part(self):
    """The run is checked, and its tasks and models are loaded."""
    code = (
        'import sys\n'
        'from stppo_jax.cli import entry\n'
        'from stppo_jax.training import loop\n'
        'from experiments import st_ppo_tiny\n'
        'from stppo_jax.assembly import components\n'
        'from stppo_jax.rollout import prepare\n'
        'from stppo_jax.settings import objective, validation\n'
        'config = validation.validate(st_ppo_tiny.get_config())\n'
        'parts = components.resolve(config).load()\n'
        'parts.check_prompts(parts.held_out)\n'
        'objective.make_variant(config)\n'
        'prepare.load_policy(config)\n'
        'print(*sys.modules)\n'
    )
    output = subprocess.run(
        [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for module in OPTIONAL:
      path = PACKAGE / module.replace('.', '/')
      self.assertTrue(path.is_dir() or path.with_suffix('.py').is_file(), module)
      self.assertNotIn(f'stppo_jax.{module}', output)

  def test_config_imports_no_library_of_training(self):
    """Each command imports it, also those that train nothing."""
    code = 'import sys; import stppo_jax.config; print(*sys.modules)'
    command = [sys.executable, '-c', code]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    self.assertNoCommonElements(output.split(), ['optax', 'chex', 'orbax', 'transformers'])

  def test_experiments_have_get_config(self):
    for path in (ROOT / 'experiments').glob('*.py'):
      names = [node.name for node in parse(path).body if isinstance(node, ast.FunctionDef)]
      self.assertIn('get_config', names, path)

  def test_experiments_import_no_command_line_or_tests(self):
    for path in (ROOT / 'experiments').rglob('*.py'):
      self.assertNoCommonElements(
          {module.split('.')[0] for module in imports(path)}, {'run', 'tests', 'benchmarks'}
      )

  def test_only_these_files_read_the_config(self):
    """Others take values. (Their `config`, where they have one, is a model's: no sections.)"""
    sections = {field.name for field in dataclasses.fields(config_lib.Config)} - {'name', 'seed'}
    for path in PACKAGE.rglob('*.py'):
      name = path.relative_to(PACKAGE).as_posix()
      read = {
          node.attr
          for node in ast.walk(parse(path))
          if isinstance(node, ast.Attribute)
          and isinstance(node.value, ast.Name)
          and node.value.id == 'config'
      }
      if name not in READ_THE_CONFIG | {'config.py'}:
        self.assertNoCommonElements(read, sections, name)

  def test_no_utils_module_and_no_hidden_defaults(self):
    for path in [*PACKAGE.rglob('*.py'), *(ROOT / 'experiments').rglob('*.py'), ROOT / 'run.py']:
      self.assertNotIn(path.stem, ('utils', 'util', 'helpers', 'common', 'misc'))
      for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and getattr(node.func, 'id', '') == 'getattr':
          self.assertFalse(
              len(node.args) == 3 and 'config' in ast.unparse(node.args[0]),
              f'{path}:{node.lineno}: {ast.unparse(node)}',
          )

  def test_class_names_are_unique(self):
    paths = collections.defaultdict(list)
    for path in PACKAGE.rglob('*.py'):
      for node in ast.walk(parse(path)):
        if isinstance(node, ast.ClassDef):
          paths[node.name].append(path.relative_to(PACKAGE).as_posix())
    duplicates = {name: found for name, found in paths.items() if len(found) > 1}
    self.assertEmpty(duplicates)

  def test_import_aliases_end_in_lib(self):
    for path in PACKAGE.rglob('*.py'):
      for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith('stppo_jax'):
          for alias in node.names:
            if alias.asname:
              self.assertEndsWith(alias.asname, '_lib', path)

  def test_no_comment_starts_with_of(self):
    for path in PACKAGE.rglob('*.py'):
      with open(path, 'rb') as file:
        for token in tokenize.tokenize(file.readline):
          if token.type == tokenize.COMMENT:
            first_word = token.string.removeprefix('#').split()[:1]
            self.assertNotIn('of', [word.lower() for word in first_word], f'{path}: {token.line}')


def module_name(path):
  """'stppo_jax.models.decoder', and for a package's __init__.py the package."""
  return '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')


@functools.cache
def parse(path):
  return ast.parse(path.read_text(encoding='utf-8'))


@functools.cache
def imports(path):
  """Names of all modules that a file imports, wherever in it: 'stppo_jax.models.decoder'."""
  names = []
  for node in ast.walk(parse(path)):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: a relative import'
      names += [f'{node.module}.{alias.name}' for alias in node.names]
  return names


@functools.cache
def module_names():
  return {module_name(path) for path in PACKAGE.rglob('*.py')}


def imported(path):
  """Names of the modules of this package that a file imports."""
  found = set()
  for module in imports(path):
    found |= {module, module.rpartition('.')[0]} if module not in module_names() else {module}
  return found & module_names()


def strings_without(tables, path):
  """Modules that the strings of a file name; none if the file is one of `tables`."""
  is_table = module_name(path).removeprefix('stppo_jax.') in tables
  return set() if is_table else named_in_strings(path)


@functools.cache
def named_in_strings(path):
  return modules_in_strings(parse(path))


def modules_in_strings(tree):
  """Modules in strings: 'package.module', 'package.module:attribute', and after 'package.'."""
  texts = {
      node.value
      for node in ast.walk(tree)
      if isinstance(node, ast.Constant) and isinstance(node.value, str)
  }
  names = {text.partition(':')[0] for text in texts}
  prefixes = {text for text in texts if text.endswith('.') and text[:-1] in module_names()}
  names |= {prefix + name for prefix in prefixes for name in names}
  return {name for name in names & module_names() if '.' in name}


def guests_with(module):
  """The entry of GUESTS that is this module of the package, or its room."""
  return {guest for guest in GUESTS if f'{module}.'.startswith(f'stppo_jax.{guest}.')}


if __name__ == '__main__':
  absltest.main()
