-- lease_ms, then for each live verifier: id, sequences, kv_tokens, weight
local lease_ms = tonumber(ARGV[2])
local workers, by_id = {}, {}
for i = 3, #ARGV, 4 do
  local worker = {
    id = ARGV[i], seqs = tonumber(ARGV[i + 1]), kv = tonumber(ARGV[i + 2]), weight = tonumber(ARGV[i + 3]),
  }
  worker.free_seqs, worker.free_kv = worker.seqs, worker.kv
  workers[#workers + 1] = worker
  by_id[worker.id] = worker
end

-- Credit in use is the sum of the live leases: nothing to leak, nothing to heal.
for _, text in ipairs(redis.call('HVALS', LEASES)) do
  local ends, seqs, kv, verifier = parse_lease(text)
  local worker = by_id[verifier]
  if worker and ends > now then
    worker.free_seqs = worker.free_seqs - seqs
    worker.free_kv = worker.free_kv - kv
  end
end

-- Free sequences after the placement, KV counted in sequences' worth.
local function room(worker, seqs, kv)
  return worker.weight * math.min(worker.free_seqs - seqs, (worker.free_kv - kv) * worker.seqs / worker.kv)
end

-- The worker for the request, or nil and whether any could ever take it.
local function place(request)
  local seqs, kv = tonumber(request.seqs), tonumber(request.kv)
  local avoid = by_id[request.avoid]
  if avoid and #workers == 1 then
    avoid = nil
  end
  local best, best_room, possible = nil, nil, false
  for _, worker in ipairs(workers) do
    if worker ~= avoid and worker.weight > 0 and seqs <= worker.seqs and kv <= worker.kv then
      possible = true
      if seqs <= worker.free_seqs and kv <= worker.free_kv then
        local worker_room = room(worker, seqs, kv)
        if not best or worker_room > best_room then
          best, best_room = worker, worker_room
        end
      end
    end
  end
  return best, possible
end

local function bind(id, request, worker)
  if tonumber(request.charged) == 0 then
    charge(request.class, request.tenant, request.kv)
    request.charged = request.kv
  end
  take_waiting(id, request)
  request.verifier = worker.id
  -- From the clock, so that no epoch is used twice even if the server lost its last writes.
  request.epoch = math.max(math.floor(now), tonumber(request.epoch) + 1)
  redis.call('HSET', key('req', id), 'state', 'leased', 'verifier', worker.id, 'epoch', int(request.epoch),
    'charged', request.charged, 'retry', '0')
  put_lease(id, request, lease_ms)
  worker.free_seqs = worker.free_seqs - tonumber(request.seqs)
  worker.free_kv = worker.free_kv - tonumber(request.kv)
  tell_owner(request.owner, request.epoch, worker.id, id, lease_ms)
end

local granted = 0

-- True if it was granted; false if it can't be now; nil if it has to wait for room, and all behind it.
local function try(id)
  local request = load(id)
  if not owner_lives(request.owner) then
    return false
  end
  local worker, possible = place(request)
  if worker then
    bind(id, request, worker)
    granted = granted + 1
    return true
  end
  if possible then
    return nil
  end
  return false
end

local function grant_retries()
  for _, id in ipairs(redis.call('ZRANGE', RETRY, 0, -1)) do
    if try(id) == nil then
      return false
    end
  end
  return true
end

-- The active tenant with the least service that is not passed over.
local function next_tenant(class, passed, passed_count)
  for _, tenant in ipairs(redis.call('ZRANGE', key('active', class), 0, passed_count)) do
    if not passed[tenant] then
      return tenant
    end
  end
  return nil
end

local function grant_class(class)
  local passed, passed_count, skip = {}, 0, {}
  while true do
    local tenant = next_tenant(class, passed, passed_count)
    if not tenant then
      return true
    end
    local at = skip[tenant] or 0
    local id = redis.call('ZRANGE', key('queue', class, tenant), at, at)[1]
    if not id then
      passed[tenant] = true
      passed_count = passed_count + 1
    else
      local outcome = try(id)
      if outcome == nil then
        return false
      end
      if not outcome then
        skip[tenant] = at + 1
      end
    end
  end
end

drop_expired(lease_ms)
if #workers > 0 and grant_retries() then
  for _, class in ipairs(redis.call('ZRANGE', CLASSES, 0, -1)) do
    if not grant_class(class) then
      break
    end
  end
end
grants_per_s(granted)
return granted
