"""The files of docs/recipes: syntax, names of settings and the parts that refer to each other."""

import importlib.util
import pathlib
import re
import subprocess

from absl.testing import absltest
from absl.testing import parameterized
import yaml

from stppo_jax import config as schema
from stppo_jax.settings import validation

FOLDER = pathlib.Path(__file__).parent.parent / 'docs' / 'recipes'
SCRIPTS = ('one_node.sh', 'two_nodes.sbatch', 'tpu_pod.sh', 'tpu_bucket.sh')
MANIFEST = 'kubernetes.yaml'


def read(name):
  return (FOLDER / name).read_text(encoding='utf-8')


class RecipesTest(parameterized.TestCase):

  def test_all_files_are_checked(self):
    self.assertCountEqual((*SCRIPTS, MANIFEST), [path.name for path in FOLDER.iterdir()])

  @parameterized.parameters(*SCRIPTS, MANIFEST)
  def test_settings_exist_and_recipe_says_not_run(self, name):
    text = read(name)
    self.assertIn('# Not run yet.\n', text)
    known = {path for path, _, _ in validation.fields(schema.Config())}
    self.assertEmpty(set(re.findall(r'--config\.([\w.]+)', text)) - known)
    self.assertIn('--config.data.source=', text)  # the experiment has no embedded questions
    self.assertIn('--config.retriever.url=', text)
    for path in re.findall(r'(experiments/\w+\.py)', text):
      self.assertTrue((FOLDER.parent.parent / path).is_file(), path)

  @parameterized.parameters(*SCRIPTS)
  def test_bash_parses_script(self, name):
    subprocess.run(['bash', '-n', FOLDER / name], check=True)

  def test_slurm_directives_precede_commands(self):
    """SLURM ignores those after the first command."""
    lines = read('two_nodes.sbatch').splitlines()
    directives = [i for i, line in enumerate(lines) if line.startswith('#SBATCH')]
    commands = [i for i, line in enumerate(lines) if line and not line.startswith('#')]
    self.assertLess(max(directives), min(commands))

  def test_parts_of_manifest_fit(self):
    parts = {
        (x['kind'], x['metadata']['name']): x['spec'] for x in yaml.safe_load_all(read(MANIFEST))
    }
    engines = parts['StatefulSet', 'engine']
    pod = engines['template']
    labels = pod['metadata']['labels']
    self.assertEqual(engines['selector']['matchLabels'], labels)
    self.assertEqual(parts['NetworkPolicy', 'engine']['podSelector']['matchLabels'], labels)
    for name in ('engines', 'policy'):
      self.assertEqual(parts['Service', name]['selector'], labels)
    trainer = parts['Job', 'trainer']['template']
    (rule,) = parts['NetworkPolicy', 'engine']['ingress']
    allowed = rule['from'][0]['podSelector']['matchLabels']
    self.assertLessEqual(allowed.items(), trainer['metadata']['labels'].items())
    for spec in (pod['spec'], trainer['spec']):
      volumes = {volume['name'] for volume in spec['volumes']}
      mounts = {mount['name'] for mount in spec['containers'][0]['volumeMounts']}
      self.assertEqual(mounts, volumes)
    (given,) = [x for x in trainer['spec']['containers'][0]['args'] if 'rollout.engine=' in x]
    hosts = re.findall(r'http://([\w-]+)\.(\w+):8000', given)
    expected = [(f'engine-{i}', engines['serviceName']) for i in range(engines['replicas'])]
    self.assertEqual(hosts, expected)

  @absltest.skipIf(
      importlib.util.find_spec('kubernetes_validate') is None, 'kubernetes-validate is missing'
  )
  def test_manifest_has_schema_of_kubernetes(self):
    import kubernetes_validate

    for part in yaml.safe_load_all(read(MANIFEST)):
      kubernetes_validate.validate(part, '1.37', strict=True)


if __name__ == '__main__':
  absltest.main()
