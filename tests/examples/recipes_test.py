"""The files of docs/recipes: syntax, schemas, names of settings, and the processes that they start.

The processes run on a cluster of loopback addresses with small models and a stand-in for vLLM. The
command lines are those of the files.
"""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

from absl.testing import absltest
from absl.testing import parameterized
import jsonschema
import pytest
import yaml

from stppo_jax import config as schema
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.settings import validation
from tests.support import cluster as cluster_lib

FOLDER = pathlib.Path(__file__).parents[2] / 'docs' / 'recipes'
SCRIPTS = ('one_node.sh', 'nodes.sbatch', 'tpu_pod.sh', 'tpu_bucket.sh')
JOBSET = 'jobset.yaml'
COMPOSE = 'compose.yaml'
# A folder with jobset.x-k8s.io_jobsets.yaml of a release of JobSet (config/components/crd/bases)
# and compose-spec.json of the Compose specification (schema). Both are Apache-2.0 and large.
SCHEMAS = os.environ.get('RECIPE_SCHEMAS', '')
# The extra `dev` puts it beside Python, whose folder may not be in PATH.
SHELLCHECK = shutil.which(
    'shellcheck', path=f'{os.path.dirname(sys.executable)}:{os.environ["PATH"]}'
)
KEY = 'a key of this test'


def read(name: str) -> str:
  """Returns the text of a recipe."""
  return (FOLDER / name).read_text(encoding='utf-8')


def parts() -> dict[tuple[str, str], dict[str, Any]]:
  """Returns the specs of the JobSet's file by kind and name."""
  texts = yaml.safe_load_all(read(JOBSET))
  return {(part['kind'], part['metadata']['name']): part['spec'] for part in texts}


def jobs() -> dict[str, dict[str, Any]]:
  """Returns the replicated jobs of the JobSet by name."""
  return {job['name']: job for job in parts()['JobSet', 'stppo']['replicatedJobs']}


def pod(job: dict[str, Any]) -> dict[str, Any]:
  """Returns the spec of the pods of a replicated job."""
  return job['template']['spec']['template']['spec']


def closed(node: Any) -> Any:
  """Returns a schema that refuses unknown fields, as the API server does."""
  if isinstance(node, list):
    return [closed(value) for value in node]
  if not isinstance(node, dict):
    return node
  result = {name: closed(value) for name, value in node.items()}
  if 'x-kubernetes-int-or-string' in result:
    result.pop('type', None)
  is_open = 'x-kubernetes-preserve-unknown-fields' in result
  if result.get('type') == 'object' and 'properties' in result and not is_open:
    result.setdefault('additionalProperties', False)
  return result


class RecipesTest(parameterized.TestCase):

  def test_all_files_are_checked(self):
    self.assertCountEqual((*SCRIPTS, JOBSET, COMPOSE), [path.name for path in FOLDER.iterdir()])

  @parameterized.parameters(*SCRIPTS, JOBSET, COMPOSE)
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

  @parameterized.parameters(*SCRIPTS)
  @absltest.skipIf(SHELLCHECK is None, 'shellcheck is missing')
  def test_shellcheck_finds_nothing(self, name):
    # SC2086: flags that words are split from. SC2016: another shell expands them.
    command = [SHELLCHECK, '--shell=bash', '--exclude=SC2086,SC2016', FOLDER / name]
    subprocess.run(command, check=True)

  def test_slurm_directives_precede_commands(self):
    """SLURM ignores those after the first command."""
    lines = read('nodes.sbatch').splitlines()
    directives = [i for i, line in enumerate(lines) if line.startswith('#SBATCH')]
    commands = [i for i, line in enumerate(lines) if line and not line.startswith('#')]
    self.assertLess(max(directives), min(commands))

  def test_names_and_labels_of_jobset_fit(self):
    all_parts = parts()
    spec = all_parts['JobSet', 'stppo']
    engine = {
        'jobset.sigs.k8s.io/jobset-name': 'stppo',
        'jobset.sigs.k8s.io/replicatedjob-name': 'engine',
    }
    for name in ('engines', 'policy'):
      self.assertEqual(all_parts['Service', name]['selector'], engine)
    self.assertEqual(all_parts['Service', 'engines']['clusterIP'], 'None')
    policy = all_parts['NetworkPolicy', 'stppo']
    run = {'matchLabels': {'jobset.sigs.k8s.io/jobset-name': 'stppo'}}
    self.assertEqual(policy['podSelector'], run)
    self.assertEqual(policy['ingress'][0]['from'], [{'podSelector': run}])
    trainer = jobs()['trainer']
    job = trainer['template']['spec']
    (container,) = pod(trainer)['containers']
    variables = {variable['name']: variable.get('value') for variable in container['env']}
    self.assertEqual(job['parallelism'], job['completions'])
    self.assertEqual(variables['TRAINERS'], str(job['completions']))
    (script,) = container['args']
    servers = re.findall(r'http://([\w-]+)\.(\w+):8001', script)
    num_servers = jobs()['environment']['template']['spec']['completions']
    subdomain = spec['network']['subdomain']
    expected = [(f'stppo-environment-0-{i}', subdomain) for i in range(num_servers)]
    self.assertEqual(servers, expected)

  def test_volumes_of_jobset_are_mounted(self):
    for job in jobs().values():
      spec = pod(job)
      volumes = {volume['name'] for volume in spec.get('volumes', ())}
      mounts = {mount['name'] for mount in spec['containers'][0].get('volumeMounts', ())}
      self.assertEqual(mounts, volumes)

  def test_any_failed_trainer_starts_all_again(self):
    spec = parts()['JobSet', 'stppo']
    job = jobs()['trainer']['template']['spec']
    self.assertEqual(job['backoffLimit'], 0)
    self.assertGreater(spec['failurePolicy']['maxRestarts'], 0)
    (rule,) = spec['failurePolicy']['rules']
    self.assertEqual((rule['action'], rule['targetReplicatedJobs']), ('FailJobSet', ['trainer']))
    (pod_rule,) = job['podFailurePolicy']['rules']
    self.assertEqual(pod_rule['action'], 'FailJob')
    self.assertEqual(pod_rule['onExitCodes']['values'], [2])
    self.assertEqual(
        pod_rule['onExitCodes']['containerName'], pod(jobs()['trainer'])['containers'][0]['name']
    )
    self.assertEqual(pod(jobs()['trainer'])['restartPolicy'], 'Never')  # or the API refuses rules
    self.assertEqual(spec['successPolicy']['targetReplicatedJobs'], ['trainer'])

  @absltest.skipIf(
      importlib.util.find_spec('kubernetes_validate') is None, 'kubernetes-validate is missing'
  )
  def test_jobset_has_schema_of_kubernetes(self):
    import kubernetes_validate

    for part in yaml.safe_load_all(read(JOBSET)):
      if part['kind'] != 'JobSet':
        kubernetes_validate.validate(part, '1.37', strict=True)
    for name, job in jobs().items():
      job = {
          'apiVersion': 'batch/v1',
          'kind': 'Job',
          'metadata': {'name': name},
          'spec': job['template']['spec'],
      }
      kubernetes_validate.validate(job, '1.37', strict=True)

  @absltest.skipIf(not SCHEMAS, 'RECIPE_SCHEMAS names no folder with schemas')
  def test_jobset_has_schema_of_its_definition(self):
    path = pathlib.Path(SCHEMAS, 'jobset.x-k8s.io_jobsets.yaml')
    definition = yaml.safe_load(path.read_text(encoding='utf-8'))
    (version,) = definition['spec']['versions']
    part = yaml.safe_load(read(JOBSET).split('\n---\n')[-1])
    self.assertEqual(part['apiVersion'], f'{definition["spec"]["group"]}/{version["name"]}')
    whole = closed(version['schema']['openAPIV3Schema'])
    whole['properties']['metadata'] = {'type': 'object'}
    jsonschema.Draft7Validator(whole).validate(part)

  @absltest.skipIf(not SCHEMAS, 'RECIPE_SCHEMAS names no folder with schemas')
  def test_compose_file_has_schema_of_specification(self):
    path = pathlib.Path(SCHEMAS, 'compose-spec.json')
    rules = json.loads(path.read_text(encoding='utf-8'))
    jsonschema.Draft7Validator(rules).validate(yaml.safe_load(read(COMPOSE)))


@pytest.mark.slow
class ProcessesTest(parameterized.TestCase):
  """Each recipe trains two updates on two simulated devices per trainer."""

  def setUp(self):
    super().setUp()
    folder = self.enterContext(tempfile.TemporaryDirectory())
    self.cluster = cluster_lib.Cluster(folder)
    self.shared = str(self.cluster.shared)
    self.addCleanup(self.cluster.stop)

  def start_retriever(self) -> str:
    """Starts the retrieval server; returns its address."""
    host = self.cluster.add_node('retriever')
    server = [sys.executable, '-m', 'stppo_jax.retrieval.server', f'--corpus={self.shared}/corpus']
    process = self.cluster.start([*server, f'--host={host}', '--port=8002'])
    url = f'http://{host}:8002'
    self.cluster.wait_for(lambda: cluster_lib.answers(f'{url}/health'), [process])
    return f'{url}/retrieve'

  def assert_code(self, process: subprocess.Popen, code: int):
    self.assertEqual(process.wait(600), code, self.cluster.logs())

  def assert_trained(self, workdir: str):
    """Two updates were made, from episodes in which the retriever was searched."""
    rows = metrics_lib.read_metrics(workdir)
    self.assertEqual(rows[-1]['step'], 2)
    self.assertGreater(rows[-1]['env/searches/mean'], 0, rows[-1])

  def start_pods(self, job: dict[str, Any], values: dict[str, str], addresses: list[str]):
    """Starts the container of each pod of a replicated job."""
    (container,) = pod(job)['containers']
    processes = []
    for index, address in enumerate(addresses):
      variables = {'JOB_COMPLETION_INDEX': str(index)}
      for variable in container['env']:
        source = variable.get('valueFrom', {})
        if 'secretKeyRef' in source:
          value = KEY
        elif 'fieldRef' in source:
          self.assertEqual(
              source['fieldRef']['fieldPath'],
              "metadata.annotations['jobset.sigs.k8s.io/coordinator']",
          )
          value = '127.0.0.1'  # all pods are here
        else:
          value = variable['value']
        variables[variable['name']] = value
      command = [*container['command'], *container['args']]
      command = cluster_lib.fill_in(command, {**values, '0.0.0.0': address})
      processes.append(self.cluster.start(command, **variables))
    return processes

  def await_ready(self, job: dict[str, Any], addresses: list[str], processes):
    """Waits until the readiness probe of each pod succeeds."""
    probe = pod(job)['containers'][0]['readinessProbe']['httpGet']
    for address in addresses:
      url = f'http://{address}:{probe["port"]}{probe["path"]}'
      self.cluster.wait_for(lambda url=url: cluster_lib.answers(url), processes)

  def test_jobset_trains_and_survives_eviction(self):
    values = {
        'RETRIEVER': self.start_retriever(),
        '/shared': self.shared,
        ':1234': f':{cluster_lib.free_port()}',
    }
    addresses = {}
    for name, job in jobs().items():
      count = job['template']['spec']['completions']
      hosts = [f'stppo-{name}-0-{i}.stppo' for i in range(count)]
      service = ['engines'] if name == 'engine' else []
      addresses[name] = [self.cluster.add_node(host, *service) for host in hosts]
    self.cluster.write_experiments(updates=3000)
    before = []
    for name in ('engine', 'environment'):
      processes = self.start_pods(jobs()[name], values, addresses[name])
      self.await_ready(jobs()[name], addresses[name], processes)
      before += processes
    self.assertEqual([x['name'] for x in jobs()['trainer']['dependsOn']], ['engine', 'environment'])
    trainers = self.start_pods(jobs()['trainer'], values, addresses['trainer'])
    workdir = f'{self.shared}/runs/st_ppo_7b'
    saved = pathlib.Path(workdir, 'checkpoints', '1')
    self.cluster.wait_for(saved.exists, [*before, *trainers])
    with self.subTest('a drained node: its pod fails after the save, so that all start again'):
      trainers[1].send_signal(signal.SIGTERM)
      self.assert_code(trainers[1], 143)
      self.assert_code(trainers[0], 0)
    with self.subTest('the second start continues'):
      done = metrics_lib.read_metrics(workdir)[-1]['step']
      self.cluster.write_experiments(updates=done + 1)
      trainers = self.start_pods(jobs()['trainer'], values, addresses['trainer'])
      for trainer in trainers:
        self.assert_code(trainer, 0)
      rows = metrics_lib.read_metrics(workdir)
      self.assertEqual([row['step'] for row in rows][-1], done + 1)
      self.assertGreater(rows[-1]['env/searches/mean'], 0)
      for engine in before[: len(addresses['engine'])]:
        self.assertIn('loaded', engine.log.read_text(encoding='utf-8'))
    with self.subTest('an error of the settings has the code of the rule'):
      shutil.rmtree(f'{self.shared}/models')
      trainers = self.start_pods(jobs()['trainer'], values, addresses['trainer'])
      self.assertEqual([trainer.wait(600) for trainer in trainers], [2, 2], self.cluster.logs())

  def test_compose_file_trains(self):
    services = yaml.safe_load(read(COMPOSE))['services']
    dockerfile = (FOLDER.parent.parent / 'Dockerfile').read_text(encoding='utf-8')
    own = json.loads(re.search(r'^ENTRYPOINT (.*)$', dockerfile, re.MULTILINE)[1])
    addresses = {name: self.cluster.add_node(name) for name in services}
    started: dict[str, subprocess.Popen] = {}

    def start(name):
      service = services[name]
      for other, condition in service.get('depends_on', {}).items():
        if other not in started:
          start(other)
        self.assertEqual(condition, {'condition': 'service_healthy'})
      values = {'/shared': self.shared, '0.0.0.0': addresses[name], '127.0.0.1': addresses[name]}
      variables = {
          key: re.sub(r'\$\{STPPO_API_KEY:.*\}', KEY, value).replace('127.0.0.1', addresses[name])
          for key, value in service['environment'].items()
      }
      for gpus in service.get('deploy', {}).get('resources', {}).get('reservations', {}).values():
        count = len(gpus[0]['device_ids'])
        variables['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={count}'
      command = [*service.get('entrypoint', own), *service['command']]
      started[name] = self.cluster.start(cluster_lib.fill_in(command, values), **variables)
      if 'healthcheck' in service:
        kind, *check = service['healthcheck']['test']
        self.assertEqual(kind, 'CMD')
        check[0] = sys.executable
        environment = {**os.environ, **variables}
        is_healthy = lambda: not subprocess.run(check, env=environment, stderr=-3).returncode
        self.cluster.wait_for(is_healthy, list(started.values()))

    start('trainer')
    self.assert_code(started['trainer'], 0)
    self.assertCountEqual(started, services)
    self.assert_trained(f'{self.shared}/runs/st_ppo')

  def script(self, name: str, **values: str) -> str:
    """Returns the path of a copy of a script with texts replaced."""
    (text,) = cluster_lib.fill_in([read(name)], values)
    path = self.cluster.folder / name
    path.write_text(text, encoding='utf-8')
    return str(path)

  def arguments(self, workdir: str) -> list[str]:
    """Returns model, data, retriever and workdir."""
    data = f'{self.shared}/data/train.parquet,{self.shared}/data/test.parquet'
    return [f'{self.shared}/models/Qwen2.5-7B', data, self.start_retriever(), workdir]

  def slurm(self, hosts: list[str]) -> dict[str, str]:
    """Returns the variables of an allocation."""
    return {
        'SLURM_JOB_ID': str(
            cluster_lib.free_port() - 61440
        ),  # JAX listens on 61440 plus this number
        'SLURM_JOB_NODELIST': ','.join(hosts),
        'SLURM_CPUS_ON_NODE': '1',
        'SLURM_GPUS_ON_NODE': str(cluster_lib.DEVICES),
        'VLLM_PYTHON': 'python3',
    }

  def test_all_nodes_but_last_train_under_slurm(self):
    hosts = [self.cluster.add_node() for _ in range(3)]
    workdir = f'{self.shared}/run'
    command = ['bash', self.script('nodes.sbatch'), *self.arguments(workdir)]
    self.assert_code(self.cluster.start(command, **self.slurm(hosts)), 0)
    self.assert_trained(workdir)

  def test_one_node_trains(self):
    workdir = f'{self.shared}/run'
    path = self.script('one_node.sh', **{'127.0.0.1': self.cluster.add_node()})
    command = ['bash', path, 'experiments/grpo_7b.py', *self.arguments(workdir)]
    self.assert_code(self.cluster.start(command, VLLM_PYTHON='python3'), 0)
    self.assert_trained(workdir)

  def test_tpu_pod_trains_with_bucket(self):
    hosts = [self.cluster.add_node('pod') for _ in range(2)]
    bucket = f'{self.shared}/bucket'
    arguments = [*self.arguments('first'), bucket]
    command = ['bash', self.script('tpu_bucket.sh'), *arguments]
    variables = {**self.slurm(hosts), 'TRAINER': 'pod', 'ZONE': 'here'}
    self.assert_code(self.cluster.start(command, **variables), 0)
    self.assert_trained(str(self.cluster.repo / 'runs' / 'first'))
    self.assertTrue(pathlib.Path(bucket, 'first', '2').is_dir())

  def test_tpu_pod_trains_with_gateway(self):
    hosts = [self.cluster.add_node('pod') for _ in range(2)]
    self.cluster.add_node('slice')
    (self.cluster.home / '.stppo_key').write_text(KEY, encoding='utf-8')
    workdir = f'{self.shared}/run'
    command = ['bash', self.script('tpu_pod.sh'), *self.arguments(workdir)]
    variables = {**self.slurm(hosts), 'TRAINER': 'pod', 'ENGINES': 'slice', 'ZONE': 'here'}
    self.assert_code(self.cluster.start(command, **variables), 0)
    self.assert_trained(workdir)


if __name__ == '__main__':
  absltest.main()
