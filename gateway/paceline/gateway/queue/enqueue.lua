-- id, owner, class, priority, tenant, sequences, kv_tokens, wait_ms, max_requests, max_tokens, lease_ms
local id, owner, kv, wait_ms = ARGV[2], ARGV[3], tonumber(ARGV[8]), tonumber(ARGV[9])
local max_requests, max_tokens, lease_ms = tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])
local reserved = load(id)
if reserved and reserved.owner ~= owner then
  return {'exists'}
end
if reserved and reserved.state ~= 'reserved' then
  return {'ok'} -- sent again because the reply was lost
end
drop_expired(lease_ms)
redis.call('ZREM', RESERVED, id)
redis.call('DEL', key('req', id))
if held() >= max_requests then
  return full('requests')
end
if tonumber(redis.call('HGET', DEPTH, 'tokens') or '0') + kv > max_tokens then
  return full('tokens')
end
local request = {
  owner = owner, class = ARGV[4], priority = ARGV[5], tenant = ARGV[6], seqs = ARGV[7], kv = ARGV[8],
  deadline = now + wait_ms, retry = '0',
}
redis.call('HSET', key('req', id), 'state', 'queued', 'owner', owner, 'class', request.class,
  'priority', request.priority, 'tenant', request.tenant, 'seqs', request.seqs, 'kv', request.kv,
  'deadline', request.deadline, 'wait_ms', wait_ms, 'epoch', 0, 'charged', 0, 'lapses', 0,
  'verifier', '', 'avoid', '', 'retry', '0')
put_waiting(id, request)
redis.call('ZREM', ENDED, id)
touch_owner(owner, lease_ms)
return {'ok'}
